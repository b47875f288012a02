"""What KV transports are measured against, over the same memory and the same records: a memcpy and a bare socket.

Also the process that holds the source memory: it serves a transport's reads, or streams records over a socket.
"""

import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.transfer_alone import Served, serve_alone
from core.clock import SystemClock
from core.ids import Incarnation, LeaseId, TransferId, fresh_incarnation
from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.api import MemoryRegion, PeerInfo
from kv_transfer.config import TransferConfig
from kv_transfer.factory import TransportFactory
from kv_transfer.lease import LeaseTable
from kv_transfer.memory import U8, allocate, region_view
from kv_transfer.settings import TransportSettings

FOREVER = 1e9
VECTORS = 1024
"""Buffers of one sendmsg or recvmsg_into: the kernel's limit."""
_ASK = struct.Struct("<QQ")  # bytes of a record, number of offsets that follow as int64


def one_component(nbytes: int) -> KVLayout:
    """A pool that is one record: any range of it can be read under a lease of page 0."""
    pool = Component(
        name="kv", kind=ComponentKind.PAGED, record_bytes=nbytes, num_records=1, stride_bytes=nbytes, capacity_tokens=16
    )
    return KVLayout(page_tokens=16, components=(pool,))


class Told(msgspec.Struct, frozen=True):
    """What the source process says of itself."""

    infos: tuple[tuple[str, PeerInfo], ...]
    lease: LeaseId
    port: int
    alone: tuple[Served, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """Transports that cannot be served here, and why."""


def serve(directory: str, nbytes: int, names: Sequence[str]) -> None:
    """Be the source: print `Told` as JSON and serve until the standard input ends."""
    clock, incarnation = SystemClock(), fresh_incarnation()
    memory = allocate([nbytes], incarnation=incarnation, directory=directory)
    fill(region_view(memory.regions[0]))
    leases = LeaseTable(layout=one_component(nbytes), clock=clock, max_per_peer=9, orphan_ttl_s=FOREVER)
    lease, _ = leases.grant(Incarnation("reader"), TransferId("all"), FOREVER)
    leases.extend(lease, [0])
    config = TransferConfig(segment_directory=directory)
    factory = TransportFactory(TransportSettings(incarnation, config), memory.regions, clock)
    infos: list[tuple[str, PeerInfo]] = []
    failed: list[tuple[str, str]] = []
    transports = []
    for name in names:
        try:
            transports.append(factory.open(name, leases, lambda: None))
            infos.append((name, transports[-1].export()))
        except Exception as error:  # noqa: BLE001 - a record says what did not run, and why
            failed.append((name, str(error)))
    region = memory.regions[0]
    served, alive = serve_alone(region.address, nbytes, [name for name, _ in infos])
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_stream, args=(listener, memory.buffers[0]), daemon=True).start()
    told = Told(tuple(infos), lease, int(listener.getsockname()[1]), tuple(served), tuple(failed))
    print(msgspec.json.encode(told).decode(), flush=True)
    sys.stdin.read()
    for transport in transports:
        transport.destroy()
    alive.clear()
    memory.close()


def fill(view: U8) -> None:
    """Bytes that differ from record to record."""
    view[:] = np.random.default_rng(1).integers(0, 256, len(view), dtype=np.uint8)


@contextlib.contextmanager
def source_process(directory: str, nbytes: int, names: Sequence[str]) -> Iterator[tuple[int, Told]]:
    """Start `serve` in a process of its own; yields its pid and what it told."""
    code = f"from benchmarks.transfer_peers import serve; serve({directory!r}, {nbytes}, {list(names)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        yield child.pid, msgspec.json.decode(child.stdout.readline(), type=Told)
        child.stdin.close()


class CopyPeer:
    """memcpy of the same scattered records within this process: the faster of numpy slices and `memmove` in a loop."""

    def __init__(self, source: U8, region: MemoryRegion) -> None:
        self._source, self._target = source, region_view(region)
        self._from, self._to = int(source.ctypes.data), region.address

    def run(self, requests: Sequence[tuple[list[int], list[int], int]]) -> None:
        """Copy every (source offsets, target offsets, record bytes)."""
        source, target = self._source, self._target
        for theirs, ours, n in requests:
            for s, t in zip(theirs, ours, strict=True):
                target[t : t + n] = source[s : s + n]

    def run_memmove(self, requests: Sequence[tuple[list[int], list[int], int]]) -> None:
        """As `run`, by the C library."""
        memmove, source, target = ctypes.memmove, self._from, self._to
        for theirs, ours, n in requests:
            for s, t in zip(theirs, ours, strict=True):
                memmove(target + t, source + s, n)


class SocketPeer:
    """The same records over one socket with nothing around them: sendmsg there, recvmsg_into here."""

    def __init__(self, port: int, target: memoryview) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target = target

    def run(self, requests: Sequence[tuple[list[int], list[int], int]], in_flight: int) -> None:
        """Land all requests in order, with so many asked for and not landed."""
        asks = [_ASK.pack(n, len(theirs)) + np.array(theirs, "<i8").tobytes() for theirs, _, n in requests]
        self._connection.sendall(b"".join(asks[:in_flight]))
        for number, (_, ours, n) in enumerate(requests, in_flight):
            left = [self._target[t : t + n] for t in ours]
            at = 0
            while at < len(left):
                got = self._connection.recvmsg_into(left[at : at + VECTORS])[0]
                while got and got >= len(left[at]):
                    got -= len(left[at])
                    at += 1
                if got:
                    left[at] = left[at][got:]
            if number < len(asks):
                self._connection.sendall(asks[number])

    def close(self) -> None:
        self._connection.close()


def _stream(listener: socket.socket, memory: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            while head := _exactly(connection, _ASK.size):
                n, count = _ASK.unpack(head)
                left = [memory[s : s + n] for s in np.frombuffer(_exactly(connection, 8 * count), "<i8").tolist()]
                at = 0
                while at < len(left):
                    sent = connection.sendmsg(left[at : at + VECTORS])
                    while sent and sent >= len(left[at]):
                        sent -= len(left[at])
                        at += 1
                    if sent:
                        left[at] = left[at][sent:]


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            return b""
        data += piece
    return data
