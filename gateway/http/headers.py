"""What request headers mean here, checked, and names made safe for response headers. Knows no bodies."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from core.errors import BadRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PRIORITY = re.compile(r"-?[0-9]{1,9}")
_SESSION_HEADERS = (b"x-session-affinity", b"x-session-id", b"x-correlation-id")
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")
_HINTS = frozenset({b"x-request-id", b"x-deadline-ms", b"x-slo-ttft-ms", b"x-priority", *_SESSION_HEADERS})
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED_FIELDS = 16


class RequestHints(msgspec.Struct, frozen=True):
    """Headers that matter beside the body."""

    timeout_s: float
    first_token_s: float = math.inf
    """When the client wants its first token at the latest; a request that cannot have it is refused at once."""
    request_id: str | None = None
    """The client's own name for the request, echoed; never used inside."""
    session: str = ""
    """Routing hint: requests of one session profit from the same worker."""
    tenant: str = ""
    """Whose key came with it."""
    priority: int | None = None
    """As the body's field of that name, which wins: lower runs first."""


def read_hints(headers: Iterable[tuple[bytes, bytes]], request_timeout_s: float, tenant: str = "") -> RequestHints:
    """Read the hints; an ill-formed id or session is ignored, an ill-formed deadline or priority is a `BadRequest`."""
    found = {name: value.decode("latin-1") for name, value in headers if name in _HINTS}
    if not found:
        return RequestHints(timeout_s=request_timeout_s, tenant=tenant)
    request_id = found.get(b"x-request-id", "")
    session = next((found[name] for name in _SESSION_HEADERS if found.get(name)), "")
    return RequestHints(
        timeout_s=_seconds("x-deadline-ms", found, request_timeout_s),
        first_token_s=_seconds("x-slo-ttft-ms", found, math.inf),
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else None,
        tenant=tenant,
        priority=_priority(found.get(b"x-priority")),
        session=session if _SESSION.fullmatch(session) else "",
    )


def _priority(value: str | None) -> int | None:
    if value is None:
        return None
    if not _PRIORITY.fullmatch(value):
        raise BadRequest("header x-priority must be a whole number of at most 9 digits", param="x-priority")
    return int(value)


def _seconds(name: str, found: Mapping[bytes, str], limit_s: float) -> float:
    milliseconds = found.get(name.encode())
    if milliseconds is None:
        return limit_s
    if not milliseconds.isascii() or not milliseconds.isdigit() or int(milliseconds) == 0:
        raise BadRequest(f"header {name} must be a positive number of milliseconds", param=name)
    return min(limit_s, int(milliseconds) / 1000)


def ignored_fields(names: Sequence[str]) -> bytes:
    """Return the header value that lists ignored fields; odd names show as `?`, a long list ends in `...`."""
    shown = [name if _FIELD.fullmatch(name) else "?" for name in names[:_MAX_NAMED_FIELDS]]
    if len(names) > _MAX_NAMED_FIELDS:
        shown.append("...")
    return ", ".join(shown).encode()
