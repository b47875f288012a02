"""Registrations, loads and requests of an imagined cluster, for tests of everything above the wire."""

from core.hashing import Namespace, check_value, fingerprint
from core.ids import Incarnation, WorkerId
from core.lifecycle import State
from core.worker import Load, Registration, Role

SECRET = b"test secret"
MODEL = "sim"
PAGE_TOKENS = 16


def namespace(model: str = MODEL, page_tokens: int = PAGE_TOKENS, revision: str = "r1", tokenizer: str = "") -> bytes:
    return Namespace(
        model=model, revision=revision, tokenizer=tokenizer, kv_dtype="f32", page_tokens=page_tokens
    ).encode()


def registration(worker_id: str, role: Role, **changes) -> Registration:
    incarnation = changes.pop("incarnation", f"{worker_id}-a")
    space = changes.pop("namespace", None) or namespace(
        changes.get("model", MODEL), changes.get("page_tokens", PAGE_TOKENS), changes.pop("revision", "r1")
    )
    values = {
        "worker_id": WorkerId(worker_id),
        "incarnation": Incarnation(incarnation),
        "role": role,
        "model": MODEL,
        "address": f"{worker_id}:1",
        "http_address": f"{worker_id}:2",
        "namespace": space,
        "fingerprint": fingerprint(space),
        "secret_check": check_value(SECRET, incarnation),
        "page_tokens": PAGE_TOKENS,
        "num_pages": 1000,
        "num_rows": 8,
        "max_tokens_total": 4096,
        "vocab_size": 1000,
        "eos_token_ids": (2,),
        "transports": ("shm", "tcp"),
    }
    return Registration(**(values | changes))


def load(**changes) -> Load:
    values = {
        "state": State.READY,
        "pages_total": 1000,
        "pages_free": 1000,
        "pages_evictable": 0,
        "rows_total": 8,
        "rows_used": 0,
        "waiting_requests": 0,
        "waiting_tokens": 0,
        "running_requests": 0,
    }
    return Load(**(values | changes))
