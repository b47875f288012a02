"""What a worker says of itself: registration, load, KV events, and how a directory sees it.

Vocabulary of membership; knows no wire format and no routing.
"""

import enum

import msgspec

from core.ids import Incarnation, WorkerId
from core.lifecycle import State


class Role(enum.StrEnum):
    """Which pool a worker belongs to. Data for routing; no worker branches on its own role."""

    PREFILL = "prefill"
    DECODE = "decode"


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once per membership stream, before anything else."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    model: str
    """Name that clients use."""
    address: str
    """host:port of the worker's gRPC server, bound port."""
    http_address: str
    """host:port of /livez, /readyz, /metrics."""
    namespace: bytes
    """`Namespace.encode()`: the gateway hashes prompts with it and never builds one."""
    fingerprint: bytes
    secret_check: bytes
    page_tokens: int
    num_pages: int
    num_rows: int
    max_tokens_total: int
    """Largest prompt + output one sequence may have here."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefill_mode: str = "remote"
    """local | remote | auto; meaningful for decode workers."""
    transports: tuple[str, ...] = ()
    domain: str = ""
    group_id: str = ""
    dp_rank: int = 0
    dp_size: int = 1
    tp_size: int = 1
    replay_tokens: int = 0
    """Tokens before the end of a cached prefix that are computed again; shorter prefixes gain nothing."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load report, with every heartbeat (1 s) and on change."""

    state: State
    pages_total: int
    pages_free: int
    pages_evictable: int
    rows_total: int
    rows_used: int
    waiting_requests: int
    waiting_tokens: int
    """Uncached prompt tokens not yet computed."""
    running_requests: int
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    leases: int = 0
    open_ops: int = 0
    unproven_pages: int = 0
    kv_backlog_bytes: int = 0
    """KV that was asked for and has not landed."""
    kv_bytes_per_s: float = 0.0
    """Rate at which KV lands while any is asked for; 0: not measured yet."""


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a worker's prefix tree. `hashes` are `core.hashing.event_hash` values."""

    kind: str
    """stored | removed | cleared"""
    hashes: tuple[int, ...] = ()
    parent: int = 0
    """Event hash of the page before the first stored one; 0 at a root."""
    medium: str = "device"


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events in order. `sequence` counts batches of one incarnation from 1; a gap asks for a snapshot."""

    sequence: int
    events: tuple[KvEvent, ...]


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All pages of a worker's tree as of batch `sequence`."""

    incarnation: Incarnation
    sequence: int
    hashes: tuple[int, ...]
