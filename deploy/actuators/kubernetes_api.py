"""The few requests to Kubernetes' API server that sizing two Deployments needs, over the standard library's HTTP.

Blocking; callers use a thread. The token is read for every request: it is rotated while we run.
"""

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlencode, urlsplit

from core.errors import ConfigError

SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and the server's authority."""
TIMEOUT_S = 10.0
Body = dict[str, Any]


class Conflict(ConfigError):
    """The object changed since it was read: read it again and decide again."""

    code = "kubernetes_conflict"


class KubernetesApi(Protocol):
    """Requests to one namespace; blocking."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Body:
        """Return an object below the namespace, e.g. ``api/v1`` + ``pods``; raises ConfigError."""
        ...

    def put(self, path: str, body: Body) -> Body:
        """Replace an object; raises Conflict if its resourceVersion is not the current one."""
        ...

    def patch(self, path: str, body: Body) -> Body:
        """Merge into an object; raises ConfigError."""
        ...


class HttpKubernetesApi:
    """`KubernetesApi` of the pod's own service account. Paths are ``GROUP/VERSION:KIND/NAME``."""

    def __init__(self, namespace: str, *, server: str = SERVER, account: Path = ACCOUNT) -> None:
        """Read nothing yet; `namespace` is where the cluster's objects are."""
        self._namespace = namespace
        self._server = urlsplit(server)
        self._account = account

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Body:
        return self._ask("GET", path, None, query or {})

    def put(self, path: str, body: Body) -> Body:
        return self._ask("PUT", path, body, {})

    def patch(self, path: str, body: Body) -> Body:
        return self._ask("PATCH", path, body, {})

    def _ask(self, method: str, path: str, body: Body | None, query: Mapping[str, str]) -> Body:
        group, _, rest = path.partition(":")
        url = f"/{group}/namespaces/{self._namespace}/{rest}" + (f"?{urlencode(query)}" if query else "")
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            token = (self._account / "token").read_text().strip()
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            host, port = self._server.hostname or "", self._server.port or 443
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
            try:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": "application/json"}
                connection.request(method, url, json.dumps(body) if body is not None else None, headers)
                answer = connection.getresponse()
                text = answer.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"Kubernetes' API server does not answer {method} {rest}: {error}") from error
        return _read(method, rest, answer.status, text)


def _read(method: str, what: str, status: int, text: bytes) -> Body:
    try:
        body = cast("Body", json.loads(text))
    except ValueError:
        body = {"message": text[:200].decode(errors="replace")}
    if status == http.client.CONFLICT:
        raise Conflict(f"{what} was changed by another writer; is a second autoscaler at work?")
    if status >= http.client.BAD_REQUEST:
        raise ConfigError(f"Kubernetes refuses {method} {what} ({status}): {body.get('message', '')}")
    return body
