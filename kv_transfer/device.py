"""Device memory as KV pools and transports see it: what they need of CUDA, without importing anything of it."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.api import I64

HANDLE_BYTES = 64
"""Of the name under which other processes map an allocation."""


class Cuda(Protocol):
    """What pools and transports use. Thread-safe. Every failure is a TransferFailed."""

    @property
    def num_devices(self) -> int:
        """Devices that this process sees."""
        ...

    def name(self, device: int) -> str:
        """Return what people call it."""
        ...

    def total_bytes(self, device: int) -> int:
        """Return the size of its memory, without using the device."""
        ...

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate zeroed memory that other processes may map, and return its address."""
        ...

    def free(self, device: int, address: int) -> None:
        """Give back what `allocate` returned: nothing may use it any more."""
        ...

    def memory(self, device: int) -> tuple[int, int]:
        """Return the device's free and total bytes."""
        ...

    def uuid(self, device: int) -> bytes:
        """Name a device in a way that other processes understand."""
        ...

    def find(self, uuid: bytes) -> int | None:
        """Return the device of that name, if this process sees it."""
        ...

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation that holds an address, and where in it the address lies."""
        ...

    def map(self, device: int, handle: bytes) -> int:
        """Map another process's allocation, of this device or of a peer that it reaches, and return where.

        Several times if need be, each with its `unmap`.
        """
        ...

    def unmap(self, device: int, handle: bytes) -> None:
        """Take back one `map`."""
        ...

    def pinned(self, device: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory [nbytes] that the device copies from and to without a detour; it goes with its last view."""
        ...

    def copy_apart(self, device: int, targets: I64, sources: I64, nbytes: I64, blocks: int = 0) -> None:
        """As `copy`, of pieces [n] of device memory that do not depend on each other, in any order: many at once.

        By a kernel of so many `blocks` where that is possible; 0: by the copy engines.
        """
        ...

    def copy(self, device: int, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy (target, source, bytes) in order, between any memories; on return or raise no byte moves any more."""
        ...
