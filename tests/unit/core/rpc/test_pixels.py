import msgspec
import pytest

from core.request import MmItem
from core.rpc.pixels import PART_BYTES, PixelParts, take_apart
from tests.fakes.rpc import a_request


def image(height: int, width: int, fill: int = 1) -> MmItem:
    pixels = bytes([fill]) * (height * width * 3)
    return MmItem(digest=bytes([fill]) * 32, start=0, end=4, height=height, width=width, pixels=pixels)


def request_with(*items: MmItem):
    return msgspec.structs.replace(a_request(), mm_items=items)


def test_a_request_with_few_pixels_carries_them_itself():
    request = request_with(image(14, 14), image(28, 14))
    assert take_apart("k", request) == (request, [])
    assert PixelParts().put_together("k", request) == request


@pytest.mark.parametrize("sizes", [[(1400, 700)], [(14, 14), (700, 700)], [(560, 560)] * 3, [(700, 700), (0, 0)]])
def test_many_pixels_travel_in_parts_and_come_together_again(sizes):
    request = request_with(*(image(*size, fill=index + 1) for index, size in enumerate(sizes)))
    light, parts = take_apart("k", request)
    assert [item.pixels for item in light.mm_items] == [b""] * len(sizes)
    assert max(len(part.pixels) for part in parts) <= PART_BYTES
    receiver = PixelParts()
    for part in parts:
        receiver.add(part)
    assert receiver.put_together("k", light) == request
    assert receiver.num_bytes == 0


def test_parts_of_several_requests_may_be_mixed():
    requests = {key: request_with(image(700, 700, fill=fill)) for fill, key in enumerate("abc")}
    taken = {key: take_apart(key, request) for key, request in requests.items()}
    receiver = PixelParts()
    for parts in zip(*(parts for _, parts in taken.values()), strict=True):
        for part in parts:
            receiver.add(part)
    for key in "cab":
        assert receiver.put_together(key, taken[key][0]) == requests[key]


def test_an_aborted_request_leaves_nothing():
    receiver = PixelParts()
    for part in take_apart("k", request_with(image(700, 700)))[1]:
        receiver.add(part)
    assert receiver.num_bytes
    receiver.drop("k")
    receiver.drop("never heard of")
    assert receiver.num_bytes == 0


def test_an_image_with_a_part_missing_comes_without_pixels():
    light, parts = take_apart("k", request_with(image(700, 700, 1), image(700, 700, 2)))
    receiver = PixelParts()
    for part in parts[:-1]:
        receiver.add(part)
    first, second = receiver.put_together("k", light).mm_items
    assert len(first.pixels) == 700 * 700 * 3
    assert second.pixels == b""


def test_what_waits_is_bounded_and_the_oldest_goes_first():
    receiver = PixelParts(max_bytes=4_000_000)
    light = {}
    for key in "abcd":
        light[key], parts = take_apart(key, request_with(image(700, 700)))
        for part in parts:
            receiver.add(part)
        assert receiver.num_bytes <= 4_000_000
    pixels = {key: receiver.put_together(key, light[key]).mm_items[0].pixels for key in "abcd"}
    assert [key for key in "abcd" if pixels[key]] == ["c", "d"]
