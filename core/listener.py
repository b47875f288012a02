"""Health and metrics over HTTP, on threads of their own: answers while the event loop or the engine is stuck.

GET /livez /readyz /startz /metrics /statusz, POST /drain. What they answer is given as callables, which run on
listener threads and so only read frozen or atomic values. Knows no service.
"""

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from core.errors import ConfigError
from core.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Concurrent requests; more are dropped, so that a flood cannot eat the process's threads."""
REQUEST_TIMEOUT_S = 5.0

Probe = Callable[[], str]
"""Returns "" if all is well, else one sentence that says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What the listener asks; each is called on a listener thread, must not block and must not touch the engine."""

    live: Probe
    """Process and engine make progress; not live means: restart me."""
    ready: Probe
    """READY and known to a gateway; not ready means: send me nothing new."""
    started: Probe
    """Past loading and warming."""
    metrics: Callable[[], bytes]
    """`Metrics.render`."""
    status: Callable[[], Mapping[str, Any]]
    """Facts for people, as JSON."""
    drain: Callable[[], None]
    """Ask the process to leave; returns at once."""


class Listener:
    """Owns the HTTP threads: `start` binds, `close` ends them."""

    def __init__(self, host: str, port: int, probes: Probes) -> None:
        self._host = host
        self._port = port
        self._probes = probes
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Bind and serve; returns the bound port. Raises `ConfigError` if the port is taken."""
        assert self._server is None, "a listener starts once"
        try:
            server = _Server(self._host, self._port, self._probes)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen for HTTP on {self._host}:{self._port}: {reason}; choose another port or stop the process that holds it"
            ) from error
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="listener", daemon=True)
        self._thread.start()
        return int(server.server_address[1])

    def close(self) -> None:
        """Stop serving and free the port; idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A probe that hangs must not keep a drained process alive.
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, probes: Probes) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.probes = probes
        self._permits = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._permits.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._permits.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        logger.debug("a request of %s failed: %r", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "tandem"
    sys_version = ""
    protocol_version = "HTTP/1.0"

    @property
    def _probes(self) -> Probes:
        assert isinstance(self.server, _Server)
        return self.server.probes

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        probes = self._probes
        answers: dict[str, Callable[[], None]] = {
            "/livez": lambda: self._answer_probe(probes.live),
            "/readyz": lambda: self._answer_probe(probes.ready),
            "/startz": lambda: self._answer_probe(probes.started),
            "/metrics": lambda: self._send(HTTPStatus.OK, probes.metrics(), CONTENT_TYPE),
            "/statusz": lambda: self._send_json(HTTPStatus.OK, probes.status()),
        }
        self._run(answers.get(path))

    def do_POST(self) -> None:
        self._run(self._drain if self.path.partition("?")[0] == "/drain" else None)

    def _run(self, answer: Callable[[], None] | None) -> None:
        if answer is None:
            self._send_text(
                HTTPStatus.NOT_FOUND, "not found: GET /livez /readyz /startz /metrics /statusz, POST /drain"
            )
            return
        try:
            answer()
        except ConnectionError:
            raise
        except Exception:
            logger.exception("%s %s failed", self.command, self.path)
            self._send_text(HTTPStatus.INTERNAL_SERVER_ERROR, "the probe failed; see the log")

    def _answer_probe(self, probe: Probe) -> None:
        missing = probe()
        self._send_text(HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK, missing or "ok")

    def _drain(self) -> None:
        # Anyone who reaches the port could end the service: so only this host, and no page in a browser on it.
        # Remote operators use the Admin call, which proves the cluster secret.
        if not ip_address(self.client_address[0]).is_loopback or self.headers.get("Origin") is not None:
            self._send_text(
                HTTPStatus.FORBIDDEN, "drain is taken from this host only; use `tandem drain` from elsewhere"
            )
            return
        self._probes.drain()
        self._send_text(HTTPStatus.ACCEPTED, "draining")

    def _send_text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, (text + "\n").encode(), "text/plain; charset=utf-8")

    def _send_json(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(value, default=str).encode() + b"\n", "application/json")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        logger.debug(format, *args)
