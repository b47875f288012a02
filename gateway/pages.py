"""What operators see over HTTP: the status page and its data, and what is held. Knows no sockets and no keys."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway.debug_why import Decisions
from gateway.http.errors import HttpFault
from gateway.http.front import Page, Pages
from gateway.http.sse import json_bytes
from gateway.leases import Leases

_POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
)
STATUS_PAGE = "/status"
"""The page itself holds no data; it asks /statusz, with the operator's key."""


def build_pages(status: Callable[[], Mapping[str, Any]], leases: Leases, decisions: Decisions) -> Pages:
    """Return all pages. `status` is the gateway's last picture of itself."""
    html = Path(__file__).with_name("status.html").read_bytes()
    return {
        STATUS_PAGE: lambda _: Page(html, "text/html; charset=utf-8", (_POLICY,)),
        "/statusz": lambda _: Page(json_bytes(status())),
        "/debug/why": lambda query: _why(query, decisions),
        "/debug/leases": lambda _: Page(json_bytes({"counts": leases.counts(), "oldest": leases.snapshot()})),
    }


def _why(query: Mapping[str, str], decisions: Decisions) -> Page:
    request_id = query.get("request_id", "")
    if not request_id:
        raise HttpFault(400, "name the request: /debug/why?request_id=...", "missing_request_id")
    found = decisions.why(request_id)
    if not found:
        raise HttpFault(404, "this gateway process has placed no such request lately", "unknown_request")
    return Page(json_bytes({"request_id": request_id, "placements": found}))
