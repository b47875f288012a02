"""Pixels of images on a stream: many of them travel in parts ahead of their request, so that others' messages do not
wait behind megabytes. Transparent to both ends; knows no model and no image.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import structs

from core.request import GenerateRequest, MmItem
from tandem.v1 import types_pb2 as pb

PART_BYTES = 1 << 20
"""A request with no more pixels than this carries them itself."""
MAX_HELD_BYTES = 256 << 20
"""Parts of one stream that may wait for their requests; beyond it the oldest request loses its pixels."""


def take_apart(key: str, request: GenerateRequest) -> tuple[GenerateRequest, list[pb.PixelPart]]:
    """Return the request and what is to be sent ahead of it; `key` names the request within the stream."""
    if sum(len(item.pixels) for item in request.mm_items) <= PART_BYTES:
        return request, []
    parts = [
        pb.PixelPart(key=key, item=index, pixels=item.pixels[start : start + PART_BYTES])
        for index, item in enumerate(request.mm_items)
        for start in range(0, len(item.pixels), PART_BYTES)
    ]
    return _with_pixels(request, [b""] * len(request.mm_items)), parts


def _with_pixels(request: GenerateRequest, pixels: Sequence[bytes]) -> GenerateRequest:
    items = [structs.replace(item, pixels=each) for item, each in zip(request.mm_items, pixels, strict=True)]
    return structs.replace(request, mm_items=tuple(items))


class PixelParts:
    """The receiving side of one stream: holds parts until their request comes, or is aborted."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, list[pb.PixelPart]] = OrderedDict()
        self.num_bytes = 0

    def add(self, part: pb.PixelPart) -> None:
        """Keep one part; parts of an image come in order."""
        self._held.setdefault(part.key, []).append(part)
        self.num_bytes += len(part.pixels)
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._held)))

    def drop(self, key: str) -> None:
        """Forget the parts of a request that will not come."""
        self.num_bytes -= sum(len(part.pixels) for part in self._held.pop(key, ()))

    def put_together(self, key: str, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its pixels. An image whose parts did not all come stays without any, as one that
        is cached does: whoever needs its pixels refuses the request.
        """
        parts = self._held.get(key)
        if parts is None:
            return request
        self.drop(key)
        pixels = [_joined(item, index, parts) for index, item in enumerate(request.mm_items)]
        return _with_pixels(request, pixels)


def _joined(item: MmItem, index: int, parts: Sequence[pb.PixelPart]) -> bytes:
    whole = item.pixels or b"".join([part.pixels for part in parts if part.item == index])
    return whole if len(whole) == item.height * item.width * 3 else b""
