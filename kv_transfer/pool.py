"""The KV memory of one worker, in host memory or on a GPU, and the driver that moves its bytes in the latter case."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.ids import Incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.device import Cuda
from kv_transfer.device_memory import DeviceMemory, allocate_on_device
from kv_transfer.factory import open_cuda
from kv_transfer.memory import RegionMemory, allocate


@dataclass(frozen=True, slots=True)
class Pool:
    """Regions in order of their index. Made first and closed last: after every engine and transport over it."""

    memory: RegionMemory | DeviceMemory
    cuda: Cuda | None
    """None: host memory."""

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """What transports register."""
        return self.memory.regions

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """Writable views of the regions; none of them on a GPU, see `spans`."""
        return self.memory.buffers if isinstance(self.memory, RegionMemory) else ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of each region, wherever it lies."""
        return tuple((region.address, region.nbytes) for region in self.regions)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.memory.close()


def open_pool(sizes: Sequence[int], *, gpu: int | None, incarnation: Incarnation, directory: str = "") -> Pool:
    """Allocate one zeroed region per size: on a GPU, or (`gpu` None) in host memory, shared if there is a directory.

    Raises ConfigError if there is no room, or no such GPU.
    """
    if gpu is None:
        return Pool(allocate(sizes, incarnation=incarnation, directory=directory), None)
    cuda = open_cuda()
    return Pool(allocate_on_device(sizes, cuda=cuda, device=gpu), cuda)
