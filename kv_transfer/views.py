"""Bytes of registered regions as the CPU may handle them: host memory in place, device memory by copies.

Everything that hashes, sends or lands bytes through the host works on these; knows no transport and no pages.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from kv_transfer.api import HOST, I64, MemoryRegion
from kv_transfer.device import Cuda
from kv_transfer.memory import U8, region_view

Copies = Iterable[tuple[int, int, int]]
"""(target offset, source offset, bytes)."""
_SMALL = 8 << 10
"""Records up to this size are copied many at a time: a call for each would cost more than a second pass through a cache."""
_TOGETHER = 256 << 10
"""Bytes of such a copy: they stay in a core's own cache."""
_WORTH = 8
"""Fewer records are copied one by one."""


class DeviceView:
    """One region in device memory. Slices are copied, and each call has moved its bytes when it returns. Thread-safe."""

    def __init__(self, cuda: Cuda, region: MemoryRegion) -> None:
        self.cuda = cuda
        self.device = region.device
        self.address = region.address
        self._nbytes = region.nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> U8:
        start, end, _ = part.indices(self._nbytes)
        return self.pieces([start], [end - start])[0]

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int], into: U8 | None = None) -> list[U8]:
        """Return copies of several pieces, fetched together; `into` is memory for them that nobody uses any more."""
        whole = np.empty(sum(sizes), np.uint8) if into is None else into
        ends = np.cumsum(sizes).tolist()
        begins = [end - size for end, size in zip(ends, sizes, strict=True)]
        base = int(whole.ctypes.data)
        self.cuda.copy(
            self.device,
            [(base + b, self.address + at, n) for b, at, n in zip(begins, offsets, sizes, strict=True)],
        )
        return [whole[b:e] for b, e in zip(begins, ends, strict=True)]


Bytes = U8 | DeviceView


def views_of(regions: Sequence[MemoryRegion], cuda: Cuda | None) -> dict[int, Bytes]:
    """Return the bytes of the regions by id; without `cuda`, those on a device have none."""
    views: dict[int, Bytes] = {region.id: region_view(region) for region in regions if region.device == HOST}
    if cuda is not None:
        views |= {region.id: DeviceView(cuda, region) for region in regions if region.device != HOST}
    return views


def pieces_of(view: Bytes, offsets: Sequence[int], sizes: Sequence[int], into: U8 | None = None) -> list[memoryview]:
    """Return the bytes of several pieces: in place where that is possible, else copied (`into` memory for them)."""
    if isinstance(view, DeviceView):
        return [piece.data for piece in view.pieces(offsets, sizes, into)]
    memory = view.data
    return [memory[at : at + size] for at, size in zip(offsets, sizes, strict=True)]


def copy_slices(target: Bytes, source: Bytes, copies: Copies) -> None:
    """Copy slices in order; on return all have been moved. Copies within host memory take no interpreter lock."""
    device = next((view for view in (target, source) if isinstance(view, DeviceView)), None)
    if device is not None:
        to, of = _address(target), _address(source)
        device.cuda.copy(device.device, [(to + t, of + s, n) for t, s, n in copies])
        return
    assert not isinstance(target, DeviceView)
    assert not isinstance(source, DeviceView)
    for t, s, n in copies:
        target[t : t + n] = source[s : s + n]


def copy_records(target: Bytes, source: Bytes, targets: I64, sources: I64, nbytes: I64) -> None:
    """Copy so many bytes from each source offset to its target offset, in order; as `copy_slices`, but faster.

    Many small records go without the interpreter lock, which other threads want meanwhile.
    """
    many_small = len(nbytes) >= _WORTH and int(nbytes.min()) <= _SMALL
    if many_small and not isinstance(target, DeviceView) and not isinstance(source, DeviceView):
        borders = [0, *(np.flatnonzero(nbytes[1:] != nbytes[:-1]) + 1).tolist(), len(nbytes)]
        if len(borders) * _WORTH <= len(nbytes):
            for first, last in itertools.pairwise(borders):
                _copy_alike(target, source, targets[first:last], sources[first:last], int(nbytes[first]))
            return
    copy_slices(target, source, zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))


def _copy_alike(target: U8, source: U8, targets: I64, sources: I64, size: int) -> None:
    if size > _SMALL:
        copy_slices(target, source, ((t, s, size) for t, s in zip(targets.tolist(), sources.tolist(), strict=True)))
        return
    to, of, each = _rows(target, size), _rows(source, size), _TOGETHER // size
    for at in range(0, len(targets), each):
        to[targets[at : at + each]] = of[sources[at : at + each]]


def _rows(view: U8, size: int) -> U8:
    """Return every range of so many bytes: row i begins at byte i."""
    return np.ndarray((len(view) - size + 1, size), np.uint8, view.data, 0, (1, 1))


def _address(view: Bytes) -> int:
    return view.address if isinstance(view, DeviceView) else int(view.ctypes.data)
