"""The sidecar's own process: maps the segments, opens the engine, serves the worker's frames until the worker is gone.

    python -m kv_transfer.backends.sidecar_child SOCKET LIFELINE

Both are descriptors inherited from the worker.
"""

import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait

import numpy as np

from core.errors import TandemError
from kv_transfer.api import MemoryRegion
from kv_transfer.backends.native import NativeEngine, Outcome, TellsOver, open_engine
from kv_transfer.backends.sidecar_wire import (
    Answer,
    Connect,
    Disconnect,
    Open,
    Over,
    Post,
    ToParent,
    receive_request,
    send,
    unpack,
)
from kv_transfer.memory import map_segment

MIN_PAUSE_S, MAX_PAUSE_S = 50e-6, 2e-3
"""How often reads in flight are looked at, if the engine does not tell: soon after a change, then less often."""
LOOKS = 16
"""Looking moves bytes, so the pauses grow with the time since the last change: they are this part of it."""


class Child:
    """One thread, but for connecting, which may wait for a peer."""

    def __init__(self, connection: "Connection[object, object]", engine: NativeEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._tickets: dict[int, int] = {}
        self._sending = threading.Lock()
        self._connecting = ThreadPoolExecutor(4, thread_name_prefix="connect")
        self._told = -1
        if isinstance(engine, TellsOver):
            self._told = told = os.eventfd(0, os.EFD_CLOEXEC)
            engine.tell_over(lambda: os.eventfd_write(told, 1))

    def serve(self) -> None:
        """Until the worker closes the socket: then EOFError or OSError."""
        changed = time.monotonic()
        watched = [self._connection, *([self._told] if self._told >= 0 else [])]
        while True:
            pause = min(max(MIN_PAUSE_S, (time.monotonic() - changed) / LOOKS), MAX_PAUSE_S)
            ready = wait(watched, pause if self._tickets and self._told < 0 else None)
            if self._told in ready:
                os.eventfd_read(self._told)
            if self._connection in ready:
                self._take()
            if self._reap() or self._connection in ready:
                changed = time.monotonic()

    def _take(self) -> None:
        frame = receive_request(self._connection)
        if isinstance(frame, Post):
            self._post(frame)
        elif isinstance(frame, Connect):
            self._connecting.submit(self._connect, frame)
        elif isinstance(frame, Disconnect):
            self._engine.disconnect(frame.peer)

    def _post(self, frame: Post) -> None:
        try:
            self._tickets[frame.number] = self._engine.post(frame.peer, unpack(frame))
        except TandemError as error:
            self._send(Over(frame.number, Outcome(error.message)))

    def _connect(self, frame: Connect) -> None:
        try:
            answer = Answer(frame.number, self._engine.connect(frame.blob, frame.timeout_s))
        except TandemError as error:
            answer = Answer(frame.number, 0, error.code, error.message)
        self._send(answer)

    def _reap(self) -> bool:
        over = [(n, outcome) for n, t in self._tickets.items() if (outcome := self._engine.wait(t, 0.0)) is not None]
        for number, outcome in over:
            del self._tickets[number]
            self._send(Over(number, outcome))
        return bool(over)

    def _send(self, frame: ToParent) -> None:
        with self._sending:
            send(self._connection, frame)


def main(socket: int, lifeline: int) -> None:
    """Open what the first frame asks for and serve it."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    connection: Connection[object, object] = Connection(socket)
    opening = receive_request(connection)
    assert isinstance(opening, Open)
    try:
        regions, maps = _map(opening)
        engine = open_engine(opening.spec, regions)
        export = engine.export() if opening.spec.serves else b""
    except TandemError as error:
        send(connection, Answer(0, b"", error.code, error.message))
        return
    send(connection, Answer(0, export))
    try:
        Child(connection, engine).serve()
    except (EOFError, OSError):
        # No orderly end: whatever the engine still does ends with the process, before its memory is unmapped.
        os._exit(0)
    del maps


def _map(opening: Open) -> tuple[list[MemoryRegion], list[mmap.mmap]]:
    maps: dict[str, mmap.mmap] = {}
    regions: list[MemoryRegion] = []
    for region in opening.regions:
        if region.segment not in maps:
            maps[region.segment] = map_segment(opening.directory, region.segment, writable=not opening.spec.serves)
        whole = np.frombuffer(maps[region.segment], np.uint8)
        regions.append(
            MemoryRegion(
                id=region.id,
                address=int(whole.ctypes.data) + region.offset,
                nbytes=region.nbytes,
                writable=not opening.spec.serves,
            )
        )
    return regions, list(maps.values())


def _end_with(lifeline: int) -> None:
    """The worker's end of this pipe closes when the worker ends, however it ends and whatever our main thread is in."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
