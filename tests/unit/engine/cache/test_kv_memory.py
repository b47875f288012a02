import mmap

import pytest
import torch

from core.errors import InvariantError
from core.kv import Component, ComponentKind, KVLayout
from engine.cache.kv_memory import DTYPES, KVMemory, anonymous_buffers, record_shape, region_sizes


def paged(**changes):
    fields = {
        "name": "kv",
        "kind": ComponentKind.PAGED,
        "record_bytes": 2 * 2 * 3 * 4 * 5 * 4,
        "num_records": 7,
        "stride_bytes": 960 + 64,
        "layers": ("0", "1"),
        "heads": 3,
        "head_dim": 5,
        "elem": "f32",
        "capacity_tokens": 4,
    }
    return Component(**(fields | changes))


def ring(**changes):
    fields = {
        "name": "window",
        "kind": ComponentKind.RING,
        "record_bytes": 2 * 3 * 8 * 5 * 8,
        "num_records": 2,
        "stride_bytes": 1920,
        "layers": ("2",),
        "heads": 3,
        "head_dim": 5,
        "elem": "f64",
        "capacity_tokens": 8,
        "region": 1,
    }
    return Component(**(fields | changes))


def state(**changes):
    fields = {
        "name": "tail",
        "kind": ComponentKind.STATE,
        "record_bytes": 48,
        "num_records": 2,
        "stride_bytes": 64,
        "elem": "i64",
        "region": 2,
    }
    return Component(**(fields | changes))


def layout(*components):
    return KVLayout(page_tokens=4, components=components)


WHOLE = layout(paged(), ring(), state())


def test_regions_are_whole_memory_pages():
    assert region_sizes(WHOLE) == [8192, 4096, 4096]


def test_components_may_share_a_region_one_after_the_other():
    both = layout(paged(), state(region=0, offset=7 * 1024))
    assert region_sizes(both) == [8192]
    memory = KVMemory(both, anonymous_buffers(both))
    memory.per_row("tail").fill_(5)
    assert memory.paged("kv").count_nonzero() == 0


def test_records_have_the_shape_of_their_component():
    assert record_shape(paged()) == (2, 2, 3, 4, 5)
    assert record_shape(ring()) == (1, 2, 3, 8, 5)
    assert record_shape(state()) == (6,)


def test_tensors_are_views_of_the_buffers_at_the_declared_strides():
    buffers = anonymous_buffers(WHOLE)
    memory = KVMemory(WHOLE, buffers)
    kv = memory.paged("kv")
    assert kv.shape == (7, 2, 2, 3, 4, 5)
    assert kv.dtype is torch.float32
    kv[3, 1, 0, 2, 3, 4] = 1.5
    at = 3 * 1024 + 4 * ((((1 * 2 + 0) * 3 + 2) * 4 + 3) * 5 + 4)
    assert bytes(buffers[0][at : at + 4]) == b"\x00\x00\xc0\x3f"
    window = memory.per_row("window")
    window[1, 0, 1, 2, 7, 4] = 1.0
    assert bytes(buffers[1][1920 + 1912 : 1920 + 1920]) == b"\x00\x00\x00\x00\x00\x00\xf0\x3f"
    assert memory.per_row("tail").dtype is torch.int64


def test_one_record_is_one_contiguous_piece():
    memory = KVMemory(WHOLE, anonymous_buffers(WHOLE))
    assert all(memory.paged("kv")[page].is_contiguous() for page in range(7))


def test_two_memories_over_one_buffer_see_the_same_bytes():
    buffers = anonymous_buffers(WHOLE)
    one, other = KVMemory(WHOLE, buffers), KVMemory(WHOLE, buffers)
    one.paged("kv")[6].fill_(2.0)
    assert other.paged("kv")[6].eq(2.0).all()
    assert other.paged("kv")[5].eq(0.0).all()


@pytest.mark.parametrize("elem", sorted(DTYPES))
def test_every_element_type_makes_a_tensor(elem):
    size = DTYPES[elem].itemsize
    one = layout(state(elem=elem, region=0, record_bytes=8 * size, stride_bytes=64))
    assert KVMemory(one, anonymous_buffers(one)).per_row("tail").shape == (2, 8)


@pytest.mark.parametrize(
    "broken",
    [
        paged(record_bytes=961),
        paged(elem="f12"),
        paged(stride_bytes=960 - 64),
        paged(stride_bytes=960 + 4),
        paged(offset=4),
        paged(num_records=0),
        paged(region=1),
        paged(heads=0, record_bytes=0),
    ],
    ids=range(8),
)
def test_a_layout_that_does_not_fit_together_is_refused(broken):
    with pytest.raises(InvariantError):
        region_sizes(layout(broken))


def test_overlapping_components_are_refused():
    with pytest.raises(InvariantError):
        region_sizes(layout(paged(), state(region=0, offset=64)))


def test_buffers_must_fit_the_layout():
    buffers = anonymous_buffers(WHOLE)
    for wrong in (buffers[:2], [buffers[0][:4096], *buffers[1:]], [buffers[0].toreadonly(), *buffers[1:]]):
        with pytest.raises(InvariantError):
            KVMemory(WHOLE, wrong)


def test_components_answer_only_to_their_own_kind():
    memory = KVMemory(WHOLE, anonymous_buffers(WHOLE))
    for ask, name in ((memory.paged, "window"), (memory.per_row, "kv"), (memory.paged, "nothing")):
        with pytest.raises(KeyError):
            ask(name)


def test_a_closed_memory_lets_its_buffers_go():
    maps = [mmap.mmap(-1, size) for size in region_sizes(WHOLE)]
    views = [memoryview(m) for m in maps]
    memory = KVMemory(WHOLE, views)
    memory.paged("kv")[0].fill_(1.0)
    memory.close()
    for view in views:
        view.release()
    for m in maps:
        m.close()


def test_records_without_heads_are_flat_and_their_parts_are_views():
    flat = paged(heads=0, head_dim=0, elem="u8", record_bytes=100, stride_bytes=128, capacity_tokens=4)
    assert record_shape(flat) == (100,)
    memory = KVMemory(layout(flat), anonymous_buffers(layout(flat)))
    pages = memory.paged("kv")
    assert pages.shape == (7, 100)
    pages[3, 20:60].unflatten(0, (4, 10))[1, 2] = 7
    assert pages[3, 32] == 7
    assert int(pages.sum()) == 7


def test_a_tensor_serves_as_a_buffer_and_must_be_plain_bytes():
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in region_sizes(WHOLE)]
    memory = KVMemory(WHOLE, buffers)
    memory.paged("kv")[3].fill_(1.0)
    assert buffers[0][3 * 1024 : 3 * 1024 + 960].view(torch.float32).eq(1.0).all()
    assert buffers[0].count_nonzero() == 2 * 240  # two bytes of a 1.0
    for wrong in (buffers[0].view(torch.int32), buffers[0].view(2, -1), buffers[0].repeat(2)[::2], buffers[0][:4096]):
        with pytest.raises(InvariantError):
            KVMemory(WHOLE, [wrong, *buffers[1:]])
