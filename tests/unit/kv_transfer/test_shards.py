"""Unequal tensor parallelism: every combination against a brute-force slice of the full tensor (reports 13, 14, 24, 45)."""

import itertools

import msgspec
import numpy as np
import pytest

from core.errors import LayoutMismatch
from core.kv import ComponentKind, KVLayout, Shard
from kv_transfer import shards
from kv_transfer.handshake import check_layouts, same_records
from kv_transfer.plan import Span, plan_pages, plan_rows
from kv_transfer.shards import assign
from tests.fakes.kv_ranks import LAYERS, TOKENS, filled, layout, memory, own_bytes, record

MAX = 1 << 20


def hand_over(sources: list[KVLayout], heads: int, target: KVLayout, rank: int) -> dict[int, np.ndarray]:
    """Copy source pages 5, 2, 3 to pages 0, 4, 5 and source row 1 to row 2; count every byte written."""
    regions, written = memory(target), memory(target)
    for source, take in zip(sources, assign(sources, target, rank), strict=True):
        held = filled(source, heads)
        copies = plan_pages(source, target, Span(0, 12, [5, 2, 3]), Span(0, 12, [0, 4, 5]), MAX, take=take)
        copies += plan_rows(source, target, 1, 2, MAX, take=take)
        for c in copies:
            for s, t, n in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), c.nbytes.tolist(), strict=True):
                regions[c.target_region][t : t + n] = held[c.source_region][s : s + n]
                written[c.target_region][t : t + n] += 1
    for component in target.components:
        places = [0, 4, 5] if component.kind is ComponentKind.PAGED else [2]
        assert all((record(component, written, at) == 1).all() for at in places), "a byte was read twice or not at all"
        assert written[component.region].sum() == len(places) * component.record_bytes, "bytes beside the records"
    return regions


def assert_right(target: KVLayout, regions: dict[int, np.ndarray], heads: int) -> None:
    for component in target.components:
        pairs = [(5, 0), (2, 4), (3, 5)] if component.kind is ComponentKind.PAGED else [(1, 2)]
        for source, place in pairs:
            assert np.array_equal(record(component, regions, place), own_bytes(component, heads, source)), (
                component.name
            )


@pytest.mark.parametrize("axes", [("HND", "HND"), ("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD")])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_pair_of_tensor_parallel_sizes_lands_the_slice_of_the_full_tensor(heads, axes):
    for source_tp, target_tp in itertools.product((1, 2, 4), (1, 2, 4)):
        sources = [layout(source_tp, rank, heads, axes[0]) for rank in range(source_tp)]
        for rank in range(target_tp):
            target = layout(target_tp, rank, heads, axes[1])
            assert_right(target, hand_over(sources, heads, target, rank), heads)


def test_the_oracle_finds_a_planner_that_takes_all_records_for_hnd(monkeypatch):
    units = shards._units
    monkeypatch.setattr(shards, "_units", lambda c, heads: units(msgspec.structs.replace(c, axes="HND"), heads))
    sources, target = [layout(1, 0, 4, "NHD")], layout(2, 1, 4, "NHD")
    landed = hand_over(sources, 4, target, 1)
    with pytest.raises(AssertionError, match="kv"):
        assert_right(target, landed, 4)


def test_holders_of_the_same_head_share_the_destinations():
    sources = [layout(4, rank, 2, "HND") for rank in range(4)]
    asked = [{i for i, take in enumerate(assign(sources, layout(4, r, 2, "HND"), r)) if "kv" in take} for r in range(4)]
    assert asked == [{0}, {1}, {2}, {3}]
    latents = [
        {i for i, take in enumerate(assign(sources, layout(2, r, 2, "HND"), r)) if "latent" in take} for r in range(2)
    ]
    assert latents == [{0}, {1}]


def test_a_source_of_equal_shape_is_read_in_whole_records():
    same = layout(2, 1, 4, "NHD")
    (copies, *_) = plan_pages(same, same, Span(0, 12, [1, 2, 3]), Span(0, 12, [3, 4, 5]), MAX)
    assert copies.nbytes.tolist() == [same.component("kv").record_bytes] * 3  # stride > record: runs stay apart


@pytest.mark.parametrize(("axes", "runs"), [("HND", LAYERS * 2), ("NHD", LAYERS * 2 * TOKENS)])
def test_a_share_of_heads_is_one_run_a_plane_in_hnd_and_one_a_token_in_nhd(axes, runs):
    take = assign([layout(1, 0, 8, axes)], layout(2, 1, 8, axes), 1)[0]
    assert len(take["kv"].nbytes) == runs


def test_a_lone_source_serves_a_smaller_share_but_not_a_larger_one():
    one, half = layout(1, 0, 4, "HND"), layout(2, 0, 4, "HND")
    assert check_layouts(one, half) == ()
    assert not same_records(one, half)
    assert same_records(half, half)
    with pytest.raises(LayoutMismatch, match=r"components\[kv\].heads: the source has \[range\(0, 2\)\]"):
        check_layouts(half, one)


@pytest.mark.parametrize(
    ("name", "change", "path"),
    [
        ("kv", {"total_heads": 8}, "total_heads"),
        ("kv", {"elem": "f16"}, "elem"),
        ("kv", {"head_dim": 2}, "head_dim"),
        ("kv", {"record_bytes": 12}, "record_bytes"),
        ("kv", {"capacity_tokens": 8}, "capacity_tokens"),
        ("kv", {"layers": ("layer.0",)}, "layers"),
        ("latent", {"record_bytes": 44}, "record_bytes"),
        ("conv", {"shards": (Shard(8, 0, 4), Shard(8, 0, 4))}, "shards"),
        ("conv", {"shards": (Shard(8, 0, 4), Shard(8, 0, 4), Shard(16, 0, 9))}, "shards"),
    ],
)
def test_what_no_plan_can_bridge_names_its_path(name, change, path):
    theirs, ours = layout(1, 0, 4, "HND"), layout(2, 0, 4, "HND")
    bad = tuple(msgspec.structs.replace(c, **change) if c.name == name else c for c in theirs.components)
    with pytest.raises(LayoutMismatch, match=rf"components\[{name}\]\.{path}"):
        check_layouts(msgspec.structs.replace(theirs, components=bad), ours)


def test_unequal_page_sizes_are_refused_at_the_handshake():
    theirs = layout(1, 0, 4, "HND")
    with pytest.raises(LayoutMismatch, match="page_tokens: the source has 8, the destination 4"):
        check_layouts(msgspec.structs.replace(theirs, page_tokens=8), theirs)


def test_a_component_that_no_rank_has_is_refused_and_one_that_nobody_needs_is_not_read():
    ours = layout(1, 0, 4, "HND")
    less = msgspec.structs.replace(ours, components=ours.components[:-1])
    with pytest.raises(LayoutMismatch, match=r"components\[latent\]"):
        assign([less], ours, 0)
    assert "latent" not in assign([ours], less, 0)[0]
