"""A second stream of a device: work that nothing needs for a while runs beside the work that others wait for.

Of a step with few rows no kernel fills a device. Only recordings do so: a step that is issued launch by launch waits for the
host, which streams and events cost more than they could win. What runs beside is ordered: it begins after all that was issued before
it, and `join` lets what follows wait for it. So memory of either stream is never used anew before the other has read it,
if tensors that the second stream reads live until `join`. Used by one thread; recordings keep the order.
"""

import contextlib
from collections.abc import Generator

import torch

_MOST_ROWS = 512
"""Kernels of more rows fill a device."""


class Beside:
    """The second stream of one model."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU all work is in line."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_open = False

    @contextlib.contextmanager
    def work(self, rows: int) -> Generator[None]:
        """Issue what is inside, over so many rows, beside what follows, if that is recorded."""
        if self._stream is None or rows > _MOST_ROWS or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what follows wait for all work beside."""
        if self._is_open and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._is_open = False
