"""What hand-overs of the shipped models move: whole, large records. Below 16 KiB every transport is bound by their number."""

import msgspec
import pytest

from core.errors import LayoutMismatch
from core.kv import ComponentKind, KVLayout
from engine.models.components import token_component
from engine.models.deepseek_v41.caches import CacheMap
from engine.models.deepseek_v41.parse import parse_config
from kv_transfer.handshake import check_layouts
from kv_transfer.plan import Span, plan_pages, plan_rows
from kv_transfer.shards import assign, heads_of, pair_runs
from tests.fakes.deepseek_configs import v41_flash_config

LARGE = 16 << 10
FLASH = CacheMap(parse_config(v41_flash_config()), 256, "f32")


def llama(tp: int, rank: int, page_tokens: int = 64) -> KVLayout:
    """32 layers, 8 heads of 128, bfloat16: one rank of a Llama of 8 billion parameters."""
    mine = heads_of(rank, tp, 8)
    part = token_component(
        "kv", ComponentKind.PAGED, region=0, layers=tuple(f"layer.{i}" for i in range(32)), heads=len(mine),
        head_dim=128, elem="bf16", capacity_tokens=page_tokens, num_records=16,
    )  # fmt: skip
    part = msgspec.structs.replace(part, total_heads=8, first_head=mine.start)
    return KVLayout(page_tokens=page_tokens, components=(part,))


def test_a_page_of_v41_is_one_record_and_neighbours_are_one_copy():
    layout = FLASH.layout(64, 4)
    (apart,) = plan_pages(layout, layout, Span(0, 512, [3, 9]), Span(0, 512, [5, 4]), 4 << 20)
    assert apart.nbytes.tolist() == [227_840, 227_840]
    (together,) = plan_pages(layout, layout, Span(0, 512, [3, 4]), Span(0, 512, [5, 6]), 4 << 20)
    assert together.nbytes.tolist() == [2 * 227_840]


def test_every_row_component_of_v41_is_one_large_record():
    layout = FLASH.layout(64, 4)
    rows = [component for component in layout.components if component.kind is not ComponentKind.PAGED]
    copies = [copy for records in plan_rows(layout, layout, 1, 2, 64 << 20) for copy in records.nbytes.tolist()]
    assert copies == [component.record_bytes for component in rows]
    assert min(copies) >= LARGE


def test_v41_between_unequal_ranks_reads_every_record_whole_from_one_of_them():
    """Its records have no heads to share out: any rank will do, and the others are not asked."""
    sources = [FLASH.layout(64, 4) for _ in range(4)]
    for rank in range(2):
        takes = assign(sources, FLASH.layout(32, 8), rank)
        assert [bool(take) for take in takes] == [i == rank for i in range(4)]


def test_v41_of_another_page_size_is_refused():
    small = CacheMap(parse_config(v41_flash_config()), 128, "f32")
    with pytest.raises(LayoutMismatch, match="page_tokens: the source has 128, the destination 256"):
        check_layouts(small.layout(64, 4), FLASH.layout(64, 4))


def test_a_page_of_llama_is_one_record_over_all_layers():
    (copies,) = plan_pages(llama(1, 0), llama(1, 0), Span(0, 64, [1]), Span(0, 64, [2]), 64 << 20)
    assert copies.nbytes.tolist() == [32 * 2 * 8 * 64 * 128 * 2]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (1, 8), (2, 1), (4, 8), (8, 1)])
def test_shares_of_llamas_heads_come_in_runs_of_at_least_16_kib(source_tp, target_tp):
    sources = [llama(source_tp, rank) for rank in range(source_tp)]
    takes = assign(sources, llama(target_tp, 0), 0)
    runs = [size for take in takes if "kv" in take for size in take["kv"].nbytes.tolist()]
    assert sum(runs) == llama(target_tp, 0).component("kv").record_bytes
    assert min(runs) >= LARGE


def test_a_plan_for_a_pair_is_made_once():
    first, second = (llama(tp, 0).component("kv") for tp in (1, 2))
    assert pair_runs(first, second) is pair_runs(first, second)
