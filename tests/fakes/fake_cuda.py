"""A CUDA driver without a GPU: its "device memory" is shared segments, its IPC handles are their names.

What `allocate` returns lies `HIDDEN` above the memory itself, where nothing is mapped: a CPU instruction that touches it
ends the process.

Works between processes, like the real one, so that the contract and fence suites run over it.
"""

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np

from core.errors import TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import HOST, MemoryRegion
from kv_transfer.device import HANDLE_BYTES
from kv_transfer.memory import RegionMemory, allocate, map_segment, region_view

UUID = b"the only fake GPU"[:16]
HIDDEN = 1 << 56
TOTAL_BYTES = 1 << 30


class FakeCuda:
    def __init__(self, directory: str, uuid: bytes = UUID):
        self.directory = directory
        self.name = uuid
        self.maps: dict[bytes, tuple[mmap.mmap, int]] = {}
        self.num_maps: dict[bytes, int] = {}
        self.allocations: dict[int, RegionMemory] = {}
        self.size = TOTAL_BYTES
        self.num_devices = 1
        self.num_copies = 0
        self.copied_bytes = 0

    def allocate(self, device: int, nbytes: int) -> int:
        if nbytes > self.memory(device)[0]:
            raise TransferFailed("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY")
        memory = allocate([nbytes], incarnation=fresh_incarnation(), directory=self.directory)
        address = memory.regions[0].address + HIDDEN
        self.allocations[address] = memory
        return address

    def free(self, device: int, address: int) -> None:
        self.allocations.pop(address).close()

    def memory(self, device: int) -> tuple[int, int]:
        used = sum(memory.regions[0].nbytes for memory in self.allocations.values())
        return self.size - used, self.size

    def total_bytes(self, device: int) -> int:
        return self.size

    def name(self, device: int) -> str:
        return "Fake GPU"

    def uuid(self, device: int) -> bytes:
        return self.name

    def find(self, uuid: bytes) -> int | None:
        return 0 if uuid == self.name else None

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        address = host_address(address)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, file_offset, _, _, *path = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last and path and path[0].startswith(self.directory):
                name = Path(path[0]).name.encode()
                assert len(name) <= HANDLE_BYTES
                return name.ljust(HANDLE_BYTES, b"\0"), address - first + int(file_offset, 16)
        raise TransferFailed("cuIpcGetMemHandle failed: CUDA_ERROR_INVALID_VALUE")

    def map(self, device: int, handle: bytes) -> int:
        if handle not in self.maps:
            try:
                mapped = map_segment(self.directory, handle.rstrip(b"\0").decode(errors="replace"))
            except (OSError, ValueError) as error:
                raise TransferFailed("cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_VALUE") from error
            self.maps[handle] = mapped, int(np.frombuffer(mapped, np.uint8).ctypes.data)
        self.num_maps[handle] = self.num_maps.get(handle, 0) + 1
        return self.maps[handle][1] + HIDDEN

    def unmap(self, device: int, handle: bytes) -> None:
        self.num_maps[handle] -= 1
        assert self.num_maps[handle] >= 0, "unmapped more often than mapped"
        if not self.num_maps[handle]:
            self.maps.pop(handle)[0].close()

    def pinned(self, device: int, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xEE, np.uint8)

    def copy_apart(self, device: int, targets, sources, nbytes, blocks: int = 0) -> None:
        order = np.random.default_rng(len(nbytes)).permutation(len(nbytes))
        self.copy(device, zip(*(column[order].tolist() for column in (targets, sources, nbytes)), strict=True))

    def copy(self, device: int, copies) -> None:
        self.num_copies += 1
        for target, source, nbytes in copies:
            self.copied_bytes += nbytes
            ctypes.memmove(host_address(target), host_address(source), nbytes)


def host_address(address: int) -> int:
    """Where the memory behind an address of the fake device really is."""
    return address - HIDDEN if address >= HIDDEN else address


def device_bytes(region: MemoryRegion) -> np.ndarray:
    """The bytes of a region on the fake device, for tests to fill and compare."""
    return region_view(replace(region, device=HOST, address=host_address(region.address)))


class FakeGpuMemory:
    """What `benchmarks.transfer_gpu` allocates from."""

    def __init__(self, directory: str):
        self.cuda = FakeCuda(directory)
        self.kept = []

    def allocate(self, nbytes: int, device: int = 0) -> MemoryRegion:
        memory = allocate([nbytes], incarnation=fresh_incarnation(), directory=self.cuda.directory)
        self.kept.append(memory)
        return replace(memory.regions[0], device=device)
