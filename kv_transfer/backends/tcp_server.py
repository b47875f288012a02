"""The serving half of the tcp transport: one thread per reader streams leased bytes in bounded frames.

The guard is asked before every frame. A reader that stops reading costs its own thread only, and not for ever. Knows no
pages: only regions, offsets and leases.
"""

import hmac
import logging
import secrets
import socket
import threading
from collections import deque

import numpy as np

from core.errors import BadRequest, ConfigError, TandemError, TransferFailed
from core.ids import Incarnation, LeaseId
from kv_transfer.api import I64, Records, SourceGuard
from kv_transfer.backends.regions import RegionTable
from kv_transfer.backends.tcp_wire import (
    FRAME,
    GREETING_BYTES,
    MAGIC,
    MAX_RECORDS,
    TOKEN_BYTES,
    Inbox,
    ReadRequest,
    RequestParser,
    Status,
    greeting,
    receive_exactly,
    send_all,
    shut,
    tune,
)
from kv_transfer.config import TransferConfig
from kv_transfer.memory import U8
from kv_transfer.plan import check_ranges, split
from kv_transfer.views import Bytes, DeviceView, pieces_of

MAX_CONNECTIONS = 256
MAX_WAITING = 64
_ACCEPT_BACKLOG = 64
logger = logging.getLogger(__name__)


class TcpServer:
    """Listens from construction to `close`. All threads are its own."""

    def __init__(
        self, config: TransferConfig, incarnation: Incarnation, regions: RegionTable, guard: SourceGuard
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._regions = regions
        self._guard = guard
        self.token = secrets.token_bytes(TOKEN_BYTES)
        try:
            self._listener = socket.create_server((config.host, config.port), backlog=_ACCEPT_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the KV data listener cannot bind {config.host}:{config.port}: {error.strerror}; set transfer.host or transfer.port"
            ) from error
        # A listener that is closed under `accept` does not wake it on every kernel.
        self._listener.settimeout(0.2)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close the listener and every connection and wait for the threads; idempotent."""
        self._closing.set()
        shut(self._listener)
        self._acceptor.join()
        with self._lock:
            threads = list(self._connections.items())
        for connection, _ in threads:
            shut(connection)
        for _, thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # Out of descriptors, or closing.
                self._closing.wait(0.05)
                continue
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS:
                    logger.warning("refused a KV reader: %d are connected", MAX_CONNECTIONS)
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True)
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection, self._config.progress_timeout_s)
            if self._greet(connection):
                _Stream(connection, self._regions, self._guard, self._config.frame_bytes, self._closing).run()
        except (OSError, TandemError) as error:
            logger.debug("a KV reader left: %s", error)
        except Exception:
            logger.exception("serving a KV reader failed; its connection is closed")
        finally:
            shut(connection)
            with self._lock:
                del self._connections[connection]

    def _greet(self, connection: socket.socket) -> bool:
        received = bytearray(GREETING_BYTES)
        waited = 0

        def on_idle() -> None:
            nonlocal waited
            waited += 1
            # Each idle moment is 50 ms.
            if waited * 0.05 > self._config.hello_timeout_s or self._closing.is_set():
                raise TransferFailed("the reader did not introduce itself in time")

        receive_exactly(connection, [memoryview(received)], on_idle)
        if not hmac.compare_digest(bytes(received), greeting(self._incarnation, self.token)):
            logger.warning("refused a KV reader: it does not know this incarnation's token")
            return False
        send_all(connection, [MAGIC])
        return True


class _Stream:
    """One connection after its greeting."""

    def __init__(
        self,
        connection: socket.socket,
        regions: RegionTable,
        guard: SourceGuard,
        frame_bytes: int,
        closing: threading.Event,
    ) -> None:
        self._connection = connection
        self._regions = regions
        self._guard = guard
        self._frame_bytes = frame_bytes
        self._closing = closing
        self._parser = RequestParser()
        self._inbox = Inbox(connection, 1 << 16)
        self._waiting: deque[ReadRequest] = deque()
        self._cancelled: set[int] = set()
        self._current = 0
        self._bounce: U8 | None = None
        """Where a frame of device memory lies while it is sent."""

    def run(self) -> None:
        while not self._closing.is_set():
            if not self._waiting:
                self._inbox.wait(500)
                self._take_requests()
                continue
            request = self._waiting.popleft()
            self._current = request.op
            status = self._answer(request)
            self._cancelled.discard(request.op)
            self._current = 0
            if status is not Status.DATA:
                send_all(self._connection, [FRAME.pack(status, request.op, 0)])

    def _answer(self, request: ReadRequest) -> Status:
        """Send the bytes. Returns how the answer still has to end; DATA if its end went out with its last bytes."""
        if not len(request.offsets):
            return Status.END
        region = self._regions.regions.get(request.region)
        records = Records(request.region, request.region, request.offsets, request.offsets, request.nbytes)
        if region is None:
            return Status.BAD
        try:
            check_ranges("source", request.offsets, request.nbytes, region.nbytes)
        except BadRequest:
            return Status.BAD
        view = self._regions.views[request.region]
        parts = frames(records, self._frame_bytes)
        for number, (offsets, nbytes) in enumerate(parts, 1):
            self._take_requests()
            if request.op in self._cancelled:
                return Status.CANCELLED
            if not self._guard.readable(LeaseId(request.lease), request.region, offsets, nbytes):
                return Status.REFUSED
            head = FRAME.pack(Status.DATA, request.op, int(nbytes.sum()))
            pieces = pieces_of(view, offsets.tolist(), nbytes.tolist(), self._bounce_of(view))
            tail = [FRAME.pack(Status.END, request.op, 0)] if number == len(parts) else []
            send_all(self._connection, [head, *pieces, *tail])
        return Status.DATA

    def _bounce_of(self, view: Bytes) -> U8 | None:
        if self._bounce is None and isinstance(view, DeviceView):
            self._bounce = view.cuda.pinned(view.device, self._frame_bytes)
        return self._bounce

    def _take_requests(self) -> None:
        while (data := self._inbox.take()) is not None:
            for request in self._parser.feed(data):
                if isinstance(request, ReadRequest):
                    self._waiting.append(request)
                elif request.op == self._current or any(request.op == waiting.op for waiting in self._waiting):
                    # A cancel that met its END on the way names nothing any more.
                    self._cancelled.add(request.op)
            if len(self._waiting) > MAX_WAITING:
                raise TransferFailed("the reader asked for too much at once")


def frames(records: Records, frame_bytes: int) -> list[tuple[I64, I64]]:
    """Return (source offsets, sizes) of frames of at most `frame_bytes`, in order."""
    parts = split(records, MAX_RECORDS, frame_bytes)
    return [(part.source_offsets, np.ascontiguousarray(part.nbytes)) for part in parts]
