"""The KV memory of one engine: torch views over raw buffers, laid out by a `KVLayout`, without copies.

One page (or one row) is one contiguous record over all layers of its component, so a hand-over moves it in one piece.
Where the buffers come from (shared memory, anonymous pages, a device) is the caller's matter. Record shapes:

====== ====================================================
PAGED  [num_layers, 2 (key, value), heads, page_tokens, head_dim]
RING   [num_layers, 2 (key, value), heads, capacity_tokens, head_dim]
STATE  [record_bytes / element size]
====== ====================================================

A PAGED or RING component with `heads` = 0 is flat like STATE: its model packs records of its own and knows their parts.
"""

import itertools
import mmap
from collections.abc import Sequence

import torch

from core.errors import InvariantError
from core.kv import Component, ComponentKind, KVLayout

Buffer = memoryview | torch.Tensor
"""Memory of one region: a writable view of host memory, or a 1-D uint8 tensor on any device."""
RECORD_ALIGN_BYTES = 64
REGION_ALIGN_BYTES = 4096

DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "i64": torch.int64,
}
"""Element names of `Component.elem`."""


def record_shape(component: Component) -> tuple[int, ...]:
    """Return the shape of one record; raises InvariantError if it does not fill `record_bytes`."""
    itemsize = _dtype(component).itemsize
    if component.kind is ComponentKind.STATE or not component.heads:
        shape: tuple[int, ...] = (component.record_bytes // itemsize,)
    else:
        shape = (len(component.layers), 2, component.heads, component.capacity_tokens, component.head_dim)
    count = 1
    for size in shape:
        count *= size
    if count * itemsize != component.record_bytes or count == 0:
        raise InvariantError(
            f"records {shape} of component {component.name} do not fill {component.record_bytes} bytes"
        )
    return shape


def region_sizes(layout: KVLayout) -> list[int]:
    """Return the bytes of each region (multiples of 4096), by region index.

    Raises InvariantError for a layout whose records overlap, are not aligned to 64 bytes, or whose regions have gaps.
    """
    ends: dict[int, int] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for component in layout.components:
        record_shape(component)
        stride, offset = component.stride_bytes, component.offset
        if stride % RECORD_ALIGN_BYTES or offset % RECORD_ALIGN_BYTES or stride < component.record_bytes or offset < 0:
            raise InvariantError(f"records of component {component.name} are not laid out apart and aligned")
        if component.num_records < 1:
            raise InvariantError(f"component {component.name} has no records")
        end = offset + component.num_records * stride
        spans.setdefault(component.region, []).append((offset, end))
        ends[component.region] = max(ends.get(component.region, 0), end)
    for region, parts in spans.items():
        parts.sort()
        if any(before[1] > after[0] for before, after in itertools.pairwise(parts)):
            raise InvariantError(f"components of region {region} overlap")
    if sorted(ends) != list(range(len(ends))):
        raise InvariantError(f"regions {sorted(ends)} are not numbered without gaps")
    return [-(-ends[region] // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES for region in range(len(ends))]


def anonymous_buffers(layout: KVLayout) -> list[memoryview]:
    """Return zeroed private memory for every region of a layout: for engines that share with nobody."""
    return [memoryview(mmap.mmap(-1, size)) for size in region_sizes(layout)]


class KVMemory:
    """Tensors over the regions of one layout; implements `engine.models.model.KVTensors`.

    Every buffer must be writable, contiguous and at least as long as its region, all on one device; it is kept alive by
    the tensors.
    """

    def __init__(self, layout: KVLayout, buffers: Sequence[Buffer]) -> None:
        sizes = region_sizes(layout)
        if len(buffers) != len(sizes):
            raise InvariantError(f"{len(buffers)} buffers for {len(sizes)} regions")
        self.layout = layout
        self._tensors: dict[str, torch.Tensor] = {}
        for component in layout.components:
            flat = _bytes_of(buffers[component.region])
            if flat is None or flat.numel() < sizes[component.region]:
                raise InvariantError(f"buffer of region {component.region} is too short or can not be written")
            self._tensors[component.name] = _over(component, flat)
        self._kinds = {component.name: component.kind for component in layout.components}

    def paged(self, component: str) -> torch.Tensor:
        """Return [num_pages, *record_shape] of a paged component; KeyError if there is none of that name."""
        if self._kinds[component] is not ComponentKind.PAGED:
            raise KeyError(component)
        return self._tensors[component]

    def per_row(self, component: str) -> torch.Tensor:
        """Return [num_rows, *record_shape] of a ring or state component; KeyError if there is none of that name."""
        if self._kinds[component] is ComponentKind.PAGED:
            raise KeyError(component)
        return self._tensors[component]

    def close(self) -> None:
        """Drop the tensors, so that the owner of the buffers can unmap them. Views handed out must be gone by then."""
        self._tensors.clear()
        self._kinds.clear()


def _dtype(component: Component) -> torch.dtype:
    dtype = DTYPES.get(component.elem)
    if dtype is None:
        raise InvariantError(f"component {component.name} has unknown element type {component.elem!r}")
    return dtype


def _bytes_of(buffer: Buffer) -> torch.Tensor | None:
    """Return the buffer as uint8 [n]; None if it cannot be written through."""
    if isinstance(buffer, torch.Tensor):
        return buffer if buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous() else None
    return None if buffer.readonly else torch.frombuffer(buffer, dtype=torch.uint8)


def _over(component: Component, buffer: torch.Tensor) -> torch.Tensor:
    dtype = _dtype(component)
    shape = record_shape(component)
    inner: list[int] = []
    step = 1
    for size in reversed(shape):
        inner.insert(0, step)
        step *= size
    flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    stride = component.stride_bytes // dtype.itemsize
    return flat.as_strided(
        (component.num_records, *shape), (stride, *inner), storage_offset=component.offset // dtype.itemsize
    )
