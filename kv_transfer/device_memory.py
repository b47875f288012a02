"""Memory for KV pools on a device: plain allocations, one a region, which other processes may map.

The counterpart of `kv_transfer.memory`. Not taken from a framework's caching allocator: its blocks share allocations
with other tensors, and those that grow by remapping cannot be shared with a process at all.
"""

import logging
from collections.abc import Sequence

from core.errors import ConfigError, TransferFailed
from kv_transfer.api import MemoryRegion
from kv_transfer.device import Cuda

logger = logging.getLogger(__name__)


class DeviceMemory:
    """Zeroed regions on one device, given back by `close`: after every engine and transport that uses them."""

    def __init__(self, cuda: Cuda, device: int, regions: Sequence[MemoryRegion]) -> None:
        self.regions = tuple(regions)
        self._cuda = cuda
        self._device = device
        self._closed = False

    def close(self) -> None:
        """Free every region. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _free(self._cuda, self._device, self.regions)


def allocate_on_device(
    sizes: Sequence[int], *, cuda: Cuda, device: int, what: str = "KV pool", setting: str = "engine.num_pages"
) -> DeviceMemory:
    """Allocate one region per size on a device; all bytes are zero.

    Raises ConfigError, with the sizes and the `setting` to lower, if there is no room; then nothing is kept.
    """
    if not sizes or min(sizes) <= 0:
        raise ConfigError(f"the {what} needs regions of at least one byte each")
    regions: list[MemoryRegion] = []
    try:
        for index, size in enumerate(sizes):
            address = cuda.allocate(device, size)
            regions.append(MemoryRegion(id=index, address=address, nbytes=size, writable=True, device=device))
    except TransferFailed as error:
        _free(cuda, device, regions)
        free, total = cuda.memory(device)
        raise ConfigError(
            f"the {what} needs {sum(sizes) / 2**20:.1f} MiB on GPU {device}, which has {free / 2**20:.1f} MiB free of "
            f"{total / 2**20:.1f} ({error.message}); lower {setting}, or let fewer processes share the GPU"
        ) from error
    return DeviceMemory(cuda, device, regions)


def _free(cuda: Cuda, device: int, regions: Sequence[MemoryRegion]) -> None:
    for region in regions:
        try:
            cuda.free(device, region.address)
        except TransferFailed as error:
            # The context has ended, and its memory with it.
            logger.warning("KV memory on GPU %d was not given back: %s", device, error.message)
