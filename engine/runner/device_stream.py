"""The queue of a device as the executor sees it: ordered work, events, pinned memory and captured work.

`CudaStream` is the real one. `ImmediateStream` does everything at once on the host, so that all code above can run
where there is no device. Knows no models and no plans.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class StreamEvent(Protocol):
    """A point in the queue."""

    def done(self) -> bool:
        """Return whether everything queued before has finished."""
        ...

    def wait(self) -> None:
        """Block the calling thread until `done`; any thread may."""
        ...


class CapturedWork(Protocol):
    """Work that was queued once and can be queued again over the same tensors."""

    def replay(self) -> None:
        """Queue it again."""
        ...


class DeviceStream(Protocol):
    """One queue. Used by one thread at a time, except for events."""

    device: torch.device

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread's tensor work goes into this queue."""
        ...

    def mark(self) -> StreamEvent:
        """Return an event behind everything queued so far."""
        ...

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory [numel] that copies from and to the device need not wait for."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[CapturedWork, torch.Tensor]:
        """Return `work` captured, and the tensor that it writes anew at each replay; nothing of it runs now."""
        ...

    def used_bytes(self) -> tuple[int, int]:
        """Return bytes of device memory in use, and all there are."""
        ...


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """`DeviceStream` of a GPU. Captured work shares one memory pool: only one of its results is valid at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> StreamEvent:
        # A blocking event puts the waiting thread to sleep instead of spinning.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _CudaEvent(event)

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[CapturedWork, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: transfers do.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = work()
        return graph, out

    def used_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free, total


class _Past:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is ever open."""


class _Repeated:
    def __init__(self, work: Callable[[], torch.Tensor], out: torch.Tensor) -> None:
        self._work = work
        self._out = out

    def replay(self) -> None:
        self._out.copy_(self._work())


class ImmediateStream:
    """`DeviceStream` without a device: work is done when it is queued, captured work is done again."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> StreamEvent:
        return _Past()

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[CapturedWork, torch.Tensor]:
        out = torch.empty_like(work())
        return _Repeated(work, out), out

    def used_bytes(self) -> tuple[int, int]:
        return 0, 0


def stream_of(device: torch.device) -> DeviceStream:
    """Return a queue of a device."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream(device)
