"""Where a native engine may write: a private ring of slots beside it. Our own thread copies from a slot to the pages.

So a read without proof can only dirty a slot, which is not used again before its proof; pages are free at once, because
nobody but we ever wrote them.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion, Records
from kv_transfer.backends.native import NativeEngine
from kv_transfer.memory import U8, RegionMemory, allocate
from kv_transfer.views import Bytes, copy_records

RING_REGION = -1
"""No pool has this id: pools are numbered from 0."""


class Landing:
    """One engine and its ring, from opening to fence. Thread-safe."""

    def __init__(
        self,
        open_engine: Callable[[MemoryRegion], NativeEngine],
        *,
        ring_bytes: int,
        slot_bytes: int,
        directory: str,
    ) -> None:
        self.slot_bytes = min(slot_bytes, ring_bytes)
        self._memory: RegionMemory = allocate(
            [ring_bytes],
            incarnation=fresh_incarnation(),
            directory=directory,
            what="landing ring",
            setting="transfer.landing_ring_bytes",
        )
        # Holds the mapping: a lane that still copies keeps it alive through this view.
        self._ring: U8 = np.frombuffer(self._memory.buffers[0], np.uint8)
        try:
            self.engine = open_engine(replace(self._memory.regions[0], id=RING_REGION))
        except BaseException:
            self._memory.close()
            raise
        self._memory.forget_name()
        self._num_slots = ring_bytes // self.slot_bytes
        self._free = list(range(self._num_slots))
        self._retired: dict[int, int] = {}
        self._lost = 0
        self._freed = threading.Condition()

    @property
    def broken(self) -> bool:
        """True if the engine has broken, or so much of the ring is without proof that only a fence helps."""
        if self.engine.broken:
            return True
        with self._freed:
            self._collect()
            return 2 * (len(self._retired) + self._lost) > self._num_slots

    def acquire(self, timeout_s: float) -> int | None:
        """Return a slot that nothing can write, or None if there was none in that time."""
        with self._freed:
            if not self._free:
                self._collect()
            self._freed.wait_for(lambda: self._free, timeout_s)
            return self._free.pop() if self._free else None

    def settle(self, slot: int, *, proven: bool = True) -> None:
        """The read of this slot is over: the slot is free; without proof only the fence gives it back."""
        with self._freed:
            if proven:
                self._free.append(slot)
                self._freed.notify()
            else:
                self._lost += 1

    def retire(self, ticket: int, slot: int) -> None:
        """Nobody waits for this read any more: keep its slot until its proof."""
        with self._freed:
            self._retired[ticket] = slot

    def place(self, slot: int, records: Records) -> Records:
        """Return the read that packs the sources of `records` into a slot."""
        ends = np.cumsum(records.nbytes)
        offsets = slot * self.slot_bytes + ends - records.nbytes
        return Records(records.source_region, RING_REGION, records.source_offsets, offsets, records.nbytes)

    def copy_out(self, slot: int, records: Records, target: Bytes) -> None:
        """Copy a landed slot to the targets of `records`, in order."""
        begins = slot * self.slot_bytes + np.cumsum(records.nbytes) - records.nbytes
        copy_records(target, self._ring, records.target_offsets, begins, records.nbytes)

    def close(self) -> None:
        """Destroy the engine, then let the ring go; idempotent."""
        self.engine.close()
        self._memory.close()

    def _collect(self) -> None:
        for ticket, slot in list(self._retired.items()):
            outcome = self.engine.wait(ticket, 0.0)
            if outcome is not None:
                del self._retired[ticket]
                if outcome.proven:
                    self._free.append(slot)
                    self._freed.notify()
                else:
                    self._lost += 1
