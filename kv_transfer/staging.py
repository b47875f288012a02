"""Private buffers for row records (rings and states): a read lands here and is copied into the row only when it is over.

A row may be handed to another sequence as soon as its hand-over is dropped, so no operation ever writes a row itself;
an unproven operation can only dirty a slot of this ring. Knows no transport.
"""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from core.errors import ConfigError
from core.ids import Incarnation
from core.kv import ComponentKind, KVLayout
from kv_transfer.api import HOST, MemoryRegion
from kv_transfer.memory import U8, allocate, host_views, region_view
from kv_transfer.plan import plan_rows

_ALIGN = 64


class Staging:
    """`slots` buffers, each for all row components of one sequence. One event loop."""

    def __init__(
        self, layout: KVLayout, regions: Sequence[MemoryRegion], slots: int, max_run_bytes: int, who: Incarnation
    ) -> None:
        devices = {region.id for region in regions if region.device != HOST}
        stranded = [c.name for c in layout.components if c.region in devices and c.kind is not ComponentKind.PAGED]
        if stranded:
            raise ConfigError(f"row state {stranded[0]} is on a GPU, and only pages can be handed over there")
        self._target = layout
        self._max_run_bytes = max_run_bytes
        region_id = 1 + max((region.id for region in regions), default=-1)
        self.layout = _slot_layout(layout, region_id, slots)
        """Layout of the slots: record i of every component lies in slot i."""
        self.region: MemoryRegion | None = None
        self.views: Mapping[int, U8] = host_views(regions)
        self._memory = None
        if self.layout.components:
            self._memory = allocate(
                [slots * self.layout.components[0].stride_bytes],
                incarnation=who,
                what="row staging buffer",
                setting="transfer.staging_rows",
            )
            self.region = _renumbered(self._memory.regions[0], region_id)
            self.views = {**self.views, region_id: region_view(self.region)}
        self._free = list(range(slots))
        self._freed = asyncio.Semaphore(slots)

    @property
    def needed(self) -> bool:
        """True if rows carry anything."""
        return self.region is not None

    async def acquire(self) -> int:
        """Wait for a slot. It is the caller's until `release`."""
        await self._freed.acquire()
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back: no operation can write it any more."""
        self._free.append(slot)
        self._freed.release()

    def prove(self, pages: Sequence[int]) -> None:
        """As `MemoryOwner`: the quarantine gives slots back."""
        for slot in pages:
            self.release(slot)

    def copy_out(self, slot: int, row: int) -> None:
        """Copy a landed slot into a row of the pool."""
        for records in plan_rows(self.layout, self._target, slot, row, self._max_run_bytes):
            source, target = self.views[records.source_region], self.views[records.target_region]
            for s, t, n in zip(
                records.source_offsets.tolist(), records.target_offsets.tolist(), records.nbytes.tolist(), strict=True
            ):
                target[t : t + n] = source[s : s + n]

    def close(self) -> None:
        """Unmap; after every transport is destroyed."""
        if self._memory is not None:
            self.views = {}
            self._memory.close()


def _renumbered(region: MemoryRegion, region_id: int) -> MemoryRegion:
    return MemoryRegion(id=region_id, address=region.address, nbytes=region.nbytes, writable=True)


def _slot_layout(layout: KVLayout, region_id: int, slots: int) -> KVLayout:
    offsets: dict[str, int] = {}
    size = 0
    rows = [component for component in layout.components if component.kind is not ComponentKind.PAGED]
    for component in rows:
        offsets[component.name] = size
        size += -(-component.record_bytes // _ALIGN) * _ALIGN
    return msgspec.structs.replace(
        layout,
        components=tuple(
            msgspec.structs.replace(c, region=region_id, offset=offsets[c.name], stride_bytes=size, num_records=slots)
            for c in rows
        ),
    )
