"""What is known of one HTTP request while and after it is answered: for the access log, the trace and the limits."""

from collections.abc import MutableMapping
from typing import Any, cast

import msgspec

from gateway.http.client import Scope

_KEY = "tandem.record"


class RequestRecord(msgspec.Struct):
    """Filled by whoever learns a fact first; times are the gateway clock's."""

    method: str
    path: str
    started_at: float
    client: str = ""
    tenant: str = ""
    request_id: str = ""
    """Ours."""
    client_request_id: str = ""
    model: str = ""
    status: int = 0
    error: str = ""
    """Code of the error that it ended with."""
    stream: bool = False
    samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None


def attach(scope: Scope, record: RequestRecord) -> None:
    """Give a scope its record."""
    cast("MutableMapping[str, Any]", scope)[_KEY] = record


def record_of(scope: Scope) -> RequestRecord:
    """Return the scope's record, or one that nobody reads."""
    return scope.get(_KEY) or RequestRecord(scope["method"], scope["path"], 0.0)
