"""What request headers mean here, checked, and names made safe for response headers. Knows no bodies."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.errors import BadRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED_FIELDS = 16


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Headers that matter beside the body."""

    timeout_s: float
    request_id: str | None = None
    """The client's own name for the request, echoed; never used inside."""
    session: str = ""
    """Routing hint: requests of one session profit from the same worker."""


def read_hints(headers: Iterable[tuple[bytes, bytes]], request_timeout_s: float) -> RequestHints:
    """Read the hints; an ill-formed id or session is ignored, an ill-formed deadline is a `BadRequest`."""
    found = {name: value.decode("latin-1") for name, value in headers}
    request_id = found.get(b"x-request-id", "")
    session = found.get(b"x-session-affinity") or found.get(b"x-correlation-id") or ""
    return RequestHints(
        timeout_s=_timeout(found.get(b"x-deadline-ms"), request_timeout_s),
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else None,
        session=session if _SESSION.fullmatch(session) else "",
    )


def _timeout(deadline_ms: str | None, limit_s: float) -> float:
    if deadline_ms is None:
        return limit_s
    if not deadline_ms.isascii() or not deadline_ms.isdigit() or int(deadline_ms) == 0:
        raise BadRequest("header x-deadline-ms must be a positive number of milliseconds", param="x-deadline-ms")
    return min(limit_s, int(deadline_ms) / 1000)


def ignored_fields(names: Sequence[str]) -> bytes:
    """Return the header value that lists ignored fields; odd names show as `?`, a long list ends in `...`."""
    shown = [name if _FIELD.fullmatch(name) else "?" for name in names[:_MAX_NAMED_FIELDS]]
    if len(names) > _MAX_NAMED_FIELDS:
        shown.append("...")
    return ", ".join(shown).encode()
