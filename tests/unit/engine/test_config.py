import msgspec
import pytest

from core.errors import ConfigError
from core.kv import Component, ComponentKind, KVLayout
from engine.config import EngineConfig, fitting_pages, plan_capacity
from tests.fakes.engine_rig import layout_of


def test_the_capacity_plan_states_pages_rows_and_bytes():
    config = EngineConfig(page_tokens=16, num_pages=101, num_rows=4, chunk_tokens=64)
    plan = plan_capacity(config, layout_of(config, ring_tokens=8), max_positions=10_000)
    assert (plan.usable_pages, plan.max_pages, plan.max_tokens_total) == (100, 100, 1600)
    assert plan.total_bytes == 101 * 64 + 4 * 64
    assert plan.limited_by == "pages"
    assert any("longest sequence: 1600 tokens" in line for line in plan.lines())


def test_the_context_bounds_a_sequence_when_pages_are_plenty():
    config = EngineConfig(page_tokens=16, num_pages=101, num_rows=4, chunk_tokens=64)
    plan = plan_capacity(config, layout_of(config), max_positions=100)
    assert (plan.max_tokens_total, plan.max_pages, plan.limited_by) == (100, 7, "context")


@pytest.mark.parametrize(
    ("changes", "positions", "names"),
    [
        ({"chunk_tokens": 8}, 100, "chunk_tokens"),
        ({}, 1, "context"),
        ({"num_pages": 0}, 100, "for a GPU only"),
        ({"page_tokens": 1, "num_pages": 3, "chunk_tokens": 1}, 100, None),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, positions, names):
    config = EngineConfig(**{"page_tokens": 16, "num_pages": 9, "num_rows": 2, "chunk_tokens": 64, **changes})
    if names is None:
        assert plan_capacity(config, layout_of(config), positions).max_tokens_total == 2
    else:
        with pytest.raises(ConfigError, match=names):
            plan_capacity(config, layout_of(config), positions)


def test_a_layout_of_other_pages_or_fewer_records_is_refused():
    config = EngineConfig(page_tokens=16, num_pages=9, num_rows=2, chunk_tokens=64)
    with pytest.raises(ConfigError, match="pages of 8 tokens"):
        plan_capacity(config, KVLayout(page_tokens=8, components=()), 100)
    short = Component(name="full", kind=ComponentKind.PAGED, record_bytes=1, num_records=8, stride_bytes=64)
    with pytest.raises(ConfigError, match="8 records"):
        plan_capacity(config, KVLayout(page_tokens=16, components=(short,)), 100)


@pytest.mark.parametrize("field", ["page_tokens", "num_rows", "chunk_tokens", "max_waiting", "threads"])
def test_bounds_are_enforced_when_settings_are_read(field):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({field: 0}, EngineConfig)


def test_unknown_settings_are_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"pages": 7}, EngineConfig)


def test_a_share_of_free_memory_holds_so_many_pages_and_not_one_more():
    config = EngineConfig(page_tokens=16, num_pages=3, num_rows=4)
    layout = layout_of(config, ring_tokens=8)
    paged = sum(c.stride_bytes for c in layout.components if c.kind is ComponentKind.PAGED)
    rows = 4 * sum(c.stride_bytes for c in layout.components if c.kind is not ComponentKind.PAGED)
    slack = 4096 * len(layout.components)
    free = 2 * (rows + slack + 100 * paged)
    assert fitting_pages(layout, free, 0.5) == 100
    assert fitting_pages(layout, free - 2, 0.5) == 99
    with pytest.raises(ConfigError, match=r"lower engine\.num_rows or raise engine\.memory_share"):
        fitting_pages(layout, 1000, 0.5)
