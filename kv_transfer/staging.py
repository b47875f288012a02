"""Private buffers for row records (rings and states): a read lands here and is copied into the row only when it is over.

A row may be handed to another sequence as soon as its hand-over is dropped, so no operation ever writes a row itself;
an unproven operation can only dirty a slot of this ring. Knows no transport.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from core.errors import ConfigError
from core.ids import Incarnation
from core.kv import ComponentKind, KVLayout
from kv_transfer.api import HOST, MemoryRegion
from kv_transfer.device import Cuda
from kv_transfer.device_memory import DeviceMemory, allocate_on_device
from kv_transfer.memory import RegionMemory, allocate
from kv_transfer.plan import plan_rows
from kv_transfer.views import Bytes, copy_slices, views_of

_ALIGN = 64


class Staging:
    """`slots` buffers, each for all row components of one sequence, where the rows are. One event loop."""

    def __init__(
        self,
        layout: KVLayout,
        regions: Sequence[MemoryRegion],
        slots: int,
        max_run_bytes: int,
        who: Incarnation,
        *,
        cuda: Cuda | None = None,
    ) -> None:
        device = _device_of_rows(layout, regions)
        if device != HOST and cuda is None:
            raise ConfigError("row state is on a GPU, and there is no driver to move it")
        self._target = layout
        self._max_run_bytes = max_run_bytes
        region_id = 1 + max((region.id for region in regions), default=-1)
        self.layout = _slot_layout(layout, region_id, slots)
        """Layout of the slots: record i of every component lies in slot i."""
        self.region: MemoryRegion | None = None
        self.views: Mapping[int, Bytes] = views_of(regions, cuda)
        self._memory: RegionMemory | DeviceMemory | None = None
        if self.layout.components:
            sizes = [slots * self.layout.components[0].stride_bytes]
            what, setting = "row staging buffer", "transfer.staging_rows"
            if device == HOST:
                self._memory = allocate(sizes, incarnation=who, what=what, setting=setting)
            else:
                assert cuda is not None
                self._memory = allocate_on_device(sizes, cuda=cuda, device=device, what=what, setting=setting)
            self.region = replace(self._memory.regions[0], id=region_id)
            self.views = {**self.views, **views_of([self.region], cuda)}
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
            columns = (records.target_offsets.tolist(), records.source_offsets.tolist(), records.nbytes.tolist())
            copy_slices(
                self.views[records.target_region], self.views[records.source_region], zip(*columns, strict=True)
            )

    def close(self) -> None:
        """Unmap; after every transport is destroyed."""
        if self._memory is not None:
            self.views = {}
            self._memory.close()


def _device_of_rows(layout: KVLayout, regions: Sequence[MemoryRegion]) -> int:
    """Return where the row components lie; raises ConfigError if that is not one place."""
    rows = {component.region for component in layout.components if component.kind is not ComponentKind.PAGED}
    devices = {region.device for region in regions if region.id in rows}
    if len(devices) > 1:
        raise ConfigError(f"row state lies on several devices ({sorted(devices)}), and must lie on one")
    return devices.pop() if devices else HOST


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
