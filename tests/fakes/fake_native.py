"""A `NativeEngine` without a native library: copies by `process_vm_readv`, and fails in the ways that real ones do.

Options: `hang` (posts are never over), `unproven` (reads fail without proof), `again` (reads arrive, but an earlier
attempt at them may write once more), `at_once` (a read is over when it has been posted), `crash` (the process dies by SIGSEGV at a
post), `late_s` (an "abandoned" read goes on writing for so long, in slices: what makes a fence necessary).
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from core.errors import BadRequest, ConfigError, TransferFailed
from kv_transfer.api import MemoryRegion, Records
from kv_transfer.backends.cma import read_memory
from kv_transfer.backends.native import EngineSpec, Outcome


class FakeEngine:
    posted = threading.Event()
    """Of any engine in this process."""
    sizes: ClassVar[list[int]] = []
    """Bytes of each read of any engine in this process."""

    def __init__(self, spec: EngineSpec, regions: Sequence[MemoryRegion]) -> None:
        if "refuse" in spec.options:
            raise ConfigError(spec.options["refuse"])
        self.spec = spec
        self.regions = {region.id: region for region in regions}
        self.broken = False
        self._peers: dict[int, tuple[int, dict[int, int]]] = {}
        self._reads: dict[int, Outcome | None] = {}
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def export(self) -> bytes:
        return msgspec.msgpack.encode((os.getpid(), {r.id: r.address for r in self.regions.values()}))

    def connect(self, blob: bytes, timeout_s: float) -> int:
        try:
            pid, regions = msgspec.msgpack.decode(blob, type=tuple[int, dict[int, int]])
            os.kill(pid, 0)
        except (msgspec.DecodeError, msgspec.ValidationError, OSError) as error:
            raise TransferFailed(f"the fake peer is gone: {error}") from error
        number = next(self._numbers)
        self._peers[number] = (pid, regions)
        return number

    def disconnect(self, peer: int) -> None:
        self._peers.pop(peer, None)

    def post(self, peer: int, records: Records) -> int:
        if peer not in self._peers or records.source_region not in self._peers[peer][1]:
            raise BadRequest("unknown peer or region")
        if "crash" in self.spec.options:
            os.kill(os.getpid(), signal.SIGSEGV)
        number = next(self._numbers)
        self._reads[number] = None
        self.posted.set()
        self.sizes.append(records.total_bytes)
        if "hang" not in self.spec.options:
            thread = threading.Thread(target=self._copy, args=(number, *self._peers[peer], records), daemon=True)
            self._threads.append(thread)
            thread.start()
            if "at_once" in self.spec.options:
                thread.join()
        return number

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        end = time.monotonic() + timeout_s
        while self._reads[ticket] is None and time.monotonic() < end:
            time.sleep(0.0005)
        outcome = self._reads[ticket]
        if outcome is not None:
            del self._reads[ticket]
        return outcome

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()
        for ticket, outcome in self._reads.items():
            self._reads[ticket] = outcome or Outcome("the engine was closed")

    def _copy(self, number: int, pid: int, regions: dict[int, int], records: Records) -> None:
        late_s = float(self.spec.options.get("late_s", "0"))
        columns = (records.source_offsets.tolist(), records.target_offsets.tolist(), records.nbytes.tolist())
        outcome = Outcome("no proof", proven=False) if "unproven" in self.spec.options else Outcome()
        if "unproven" in self.spec.options:
            self._reads[number] = outcome
        try:
            for source, target, nbytes in zip(*columns, strict=True):
                if self._closed:
                    return
                time.sleep(late_s / len(columns[0]))
                read_memory(
                    pid,
                    regions[records.source_region] + source,
                    self.regions[records.target_region].address + target,
                    nbytes,
                )
        except OSError as error:
            outcome = Outcome(f"the peer's memory cannot be read: {error}")
        if "unproven" not in self.spec.options:
            self._reads[number] = Outcome(outcome.error, proven="again" not in self.spec.options)


def open_engine(spec: EngineSpec, regions: Sequence[MemoryRegion]) -> FakeEngine:
    return FakeEngine(spec, regions)
