"""Fetches images from the few places that the operator allows by name. Off unless configured.

Only the exact origins are asked, redirects are not followed, proxies of the environment are not used, and size and time
are bounded. Blocking; run on a thread.
"""

import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from core.errors import BadRequest
from gateway.text.chat import ImagePart

_CHUNK = 64 << 10


class RemoteImages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `api.images.remote` of the gateway's configuration."""

    origins: tuple[str, ...] = ()
    """Where images may be fetched from, such as `https://images.example.com`; none: they come as data: URLs only."""
    max_bytes: Annotated[int, Meta(ge=1)] = 20 << 20
    """Of one file."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """For one file; it holds one of the threads that tokenize long prompts meanwhile."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object, **_more: object) -> None:
        """Follow nothing: the answer with the redirect becomes an error."""


def fetch_image(part: ImagePart, rules: RemoteImages) -> bytes:
    """Return the file at an allowed address; raises `BadRequest`."""
    address = urllib.parse.urlsplit(part.url)
    origin = f"{address.scheme}://{address.netloc}"
    if address.scheme not in ("http", "https") or origin not in rules.origins:
        raise BadRequest(
            f"`{part.where}`: images are taken as data: URLs"
            + (f" or from {', '.join(rules.origins)}" if rules.origins else " only; nothing is fetched from elsewhere"),
            param=part.where,
        )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
    ends_at = time.monotonic() + rules.timeout_s
    try:
        with cast("HTTPResponse", opener.open(part.url, timeout=rules.timeout_s)) as answer:
            return _read(answer, part, rules, ends_at)
    except (OSError, ValueError, HTTPException, urllib.error.URLError) as error:
        raise BadRequest(f"`{part.where}` cannot be fetched: {error}"[:300], param=part.where) from error


def _read(answer: HTTPResponse, part: ImagePart, rules: RemoteImages, ends_at: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while chunk := answer.read1(_CHUNK):
        size += len(chunk)
        if size > rules.max_bytes:
            raise BadRequest(f"`{part.where}` is larger than {rules.max_bytes} bytes", param=part.where)
        if time.monotonic() > ends_at:
            raise BadRequest(f"`{part.where}` did not come within {rules.timeout_s:g} s", param=part.where)
        parts.append(chunk)
    return b"".join(parts)
