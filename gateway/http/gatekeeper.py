"""Who may use which route, and what a tenant may still ask: keys in headers, rate limits, the headers that tell of them.

A key is looked at here and nowhere else: it goes into no log, no error and no worker.
"""

import math
from collections.abc import Iterable

from core.errors import NoCapacity
from core.metrics import CappedLabel, Metrics
from gateway.http.errors import Headers, HttpFault
from gateway.rate_limit import RateLimits
from gateway.series import Series
from gateway.tenants import Tenant, Tenants

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/status"})
"""For load balancers, which have no keys, and the status page, which holds no data."""
_OPERATORS = ("/metrics", "/statusz", "/debug/")


class TenantMetrics:
    """Who uses the service, by tenant."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = Series(
            metrics.counter(
                "tandem_http_tenant_requests_total", "Generation requests let in, by tenant.", {"tenant": ()}
            )
        )
        self._tokens = Series(
            metrics.counter(
                "tandem_http_tenant_tokens_total", "Tokens by tenant.", {"tenant": (), "kind": ("prompt", "output")}
            )
        )
        self._label = CappedLabel()

    def asked(self, tenant: str, prompt_tokens: int) -> None:
        """A request was let in."""
        label = self._label(tenant)
        self._requests.labels(label).inc()
        self._tokens.labels(label, "prompt").inc(prompt_tokens)

    def answered(self, tenant: str, output_tokens: int) -> None:
        """A request has ended."""
        self._tokens.labels(self._label(tenant), "output").inc(output_tokens)


class Gatekeeper:
    """One per application. Event loop's thread only."""

    def __init__(self, tenants: Tenants, limits: RateLimits, metrics: TenantMetrics | None = None) -> None:
        self._tenants = tenants
        self._limits = limits
        self._metrics = metrics

    def enter(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the name of the tenant that asks, empty where nobody is asked for; raises `HttpFault` 401 or 403."""
        if path in OPEN_PATHS:
            return ""
        key = _key(headers)
        if path.startswith(_OPERATORS):
            if self._tenants.is_admin(key):
                return ""
            raise HttpFault(403, "this is for operators: send an admin key", "admin_key_required")
        if self._tenants.are_open:
            return ""
        tenant = self._tenants.of_key(key)
        if tenant is not None:
            return tenant.name
        what = "the API key is not known here" if key else "send your API key as `authorization: Bearer ...`"
        raise HttpFault(401, what, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))

    def admit(self, name: str, prompt_tokens: int) -> Headers:
        """Count a request against its tenant's rates; return the headers that say what is left; raises `HttpFault` 429."""
        tenant = self._tenants.named(name)
        try:
            self._limits.admit(tenant, prompt_tokens)
        except NoCapacity as error:
            retry = (b"retry-after", str(math.ceil(error.retry_after_s or 1)).encode())
            headers = (retry, *self._headers(tenant))
            raise HttpFault(429, error.message, "rate_limit_exceeded", headers=headers) from error
        if self._metrics is not None:
            self._metrics.asked(name, prompt_tokens)
        return self._headers(tenant)

    def spend(self, name: str, output_tokens: int) -> None:
        """Count what a request has put out."""
        self._limits.spend(self._tenants.named(name), output_tokens)
        if self._metrics is not None:
            self._metrics.answered(name, output_tokens)

    def _headers(self, tenant: Tenant) -> Headers:
        headers: Headers = []
        if tenant.requests_per_minute <= 0 and tenant.tokens_per_minute <= 0:
            return headers
        for kind in ("requests", "tokens"):
            standing = self._limits.standing(tenant, kind)
            if standing is not None:
                for what, value in (
                    ("limit", str(standing.limit)),
                    ("remaining", str(standing.remaining)),
                    ("reset", f"{standing.reset_s:.3f}s"),
                ):
                    headers.append((f"x-ratelimit-{what}-{kind}".encode(), value.encode()))
        return headers


def _key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the key of OpenAI's or Anthropic's header, or nothing."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            return value.strip().decode("latin-1")
    return ""
