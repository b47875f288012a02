"""The bytes of the tcp transport: frames of both directions, and sockets that give up.

Reader to source: a greeting with the token of the export blob, then READ and CANCEL. Source to reader: for each READ
in order, DATA frames with the bytes of its records one after another, then one END frame that says how it went.
"""

import contextlib
import enum
import math
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from core.errors import TransferFailed
from core.ids import Incarnation
from kv_transfer.api import I64

MAGIC = b"tandemkv2"
TOKEN_BYTES = 32
INCARNATION_BYTES = 32
GREETING_BYTES = len(MAGIC) + INCARNATION_BYTES + TOKEN_BYTES
MAX_RECORDS = 4096
REQUEST = struct.Struct("<BQQII")  # kind, op, lease, region, number of records
FRAME = struct.Struct("<BQI51x")  # status, op, payload bytes; as long as a cache line, so that copies stay aligned
MAX_VECTORS = 1024
"""Buffers of one call: the limit of the kernel."""
_POLL_MS = 50
_TIMEVAL = struct.Struct("@ll")


class TcpExport(msgspec.Struct, frozen=True, kw_only=True):
    """The blob of this transport: where to connect, what proves the right to, and which regions there are."""

    host: str
    port: int
    token: bytes
    regions: tuple[tuple[int, int], ...]
    """(id, bytes)"""


class Kind(enum.IntEnum):
    """Requests."""

    READ = 1
    CANCEL = 2


class Status(enum.IntEnum):
    """Frames. All but DATA end a read."""

    DATA = 0
    END = 1
    REFUSED = 2
    """The lease is over or does not cover the bytes."""
    BAD = 3
    """No such region or bytes."""
    CANCELLED = 4


STATUSES = {int(status): status for status in Status}


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One READ as the source sees it; with no records it is a probe."""

    op: int
    lease: int
    region: int
    offsets: I64
    nbytes: I64


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop streaming a read; its END frame still comes."""

    op: int


def encode_read(op: int, lease: int, region: int, offsets: I64, nbytes: I64) -> bytes:
    """Return a READ request."""
    head = REQUEST.pack(Kind.READ, op, lease, region, len(offsets))
    return b"".join((head, offsets.astype("<i8").tobytes(), nbytes.astype("<i8").tobytes()))


def encode_cancel(op: int) -> bytes:
    """Return a CANCEL request."""
    return REQUEST.pack(Kind.CANCEL, op, 0, 0, 0)


class RequestParser:
    """Cuts requests out of a byte stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[ReadRequest | CancelRequest]:
        """Take bytes and yield the requests that are complete; raises `TransferFailed` on foreign bytes."""
        self._buffer += data
        while len(self._buffer) >= REQUEST.size:
            kind, op, lease, region, count = REQUEST.unpack_from(self._buffer)
            if kind not in (Kind.READ, Kind.CANCEL) or count > MAX_RECORDS or (kind == Kind.CANCEL and count):
                raise TransferFailed(f"the peer sent a request of kind {kind} with {count} records")
            size = REQUEST.size + 16 * count
            if len(self._buffer) < size:
                return
            numbers = np.frombuffer(bytes(self._buffer[REQUEST.size : size]), "<i8").astype(np.int64)
            del self._buffer[:size]
            if kind == Kind.CANCEL:
                yield CancelRequest(op)
            else:
                yield ReadRequest(op, lease, region, numbers[:count], numbers[count:])


def tune(connection: socket.socket, stall_timeout_s: float) -> None:
    """Small requests leave at once; calls give up after a while; a peer that vanished is noticed by the kernel.

    The kernel waits, not Python: its non-blocking sockets would return, and wake both sides, every few kilobytes.
    """
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, 1000 * _POLL_MS))
    seconds = math.ceil(stall_timeout_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(stall_timeout_s))),
        ("TCP_KEEPINTVL", max(1, int(stall_timeout_s / 3))),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(stall_timeout_s * 1000)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Inbox:
    """What a peer sends us between our own sends: read without waiting, or waited for."""

    def __init__(self, connection: socket.socket, nbytes: int) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(nbytes))
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def wait(self, timeout_ms: int) -> None:
        """Wait until bytes, or the end, are there, but not for longer."""
        self._poller.poll(timeout_ms)

    def take(self) -> memoryview | None:
        """Return what is there, valid until the next call; None: nothing. Raises `TransferFailed` at the end."""
        try:
            got = self._connection.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not got:
            raise TransferFailed("the reader closed the connection")
        return self._buffer[:got]


def receive_exactly(
    connection: socket.socket,
    views: list[memoryview],
    on_idle: Callable[[], None],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fill `views` in order over a tuned socket. `on_idle` is called whenever nothing came for a moment, and may raise to give up.

    `on_bytes` is told how many bytes came at a time.
    Raises `TransferFailed` at the end of the stream and on socket errors. Nothing is written after it returned.
    """
    at, offset, left = 0, 0, sum(map(len, views))
    while left:
        buffers = [views[at][offset:], *views[at + 1 : at + MAX_VECTORS]] if at or offset else views[:MAX_VECTORS]
        try:
            # Returns early with what there is when the socket's receive timeout has passed.
            got = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            on_idle()
            continue
        except OSError as error:
            raise TransferFailed(f"the data connection broke: {error.strerror}") from error
        if got == 0:
            raise TransferFailed("the peer closed the data connection")
        if on_bytes is not None:
            on_bytes(got)
        left -= got
        if left:
            at, offset = _advance(views, at, offset + got)


def send_all(connection: socket.socket, views: list[memoryview | bytes]) -> None:
    """Send all buffers in order over a tuned socket, within its timeout for each call; raises OSError."""
    left, at, offset = sum(map(len, views)), 0, 0
    while left:
        buffers = (
            [memoryview(views[at])[offset:], *views[at + 1 : at + MAX_VECTORS]]
            if offset
            else views[at : at + MAX_VECTORS]
        )
        sent = connection.sendmsg(buffers)
        left -= sent
        if left:
            at, offset = _advance(views, at, offset + sent)


def _advance(views: Sequence[memoryview | bytes], at: int, offset: int) -> tuple[int, int]:
    """Return the first view that is not done, and how much of it is, when `offset` bytes from view `at` on are done."""
    while offset >= len(views[at]):
        offset -= len(views[at])
        at += 1
    return at, offset


def greeting(incarnation: Incarnation, token: bytes) -> bytes:
    """Return the first bytes of a connection: which source is meant, and the proof that it told us its address."""
    return MAGIC + incarnation.encode().ljust(INCARNATION_BYTES)[:INCARNATION_BYTES] + token


def shut(connection: socket.socket) -> None:
    """Wake every thread that waits on the socket and close it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
