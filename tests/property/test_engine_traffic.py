"""Random traffic against the whole scheduler: every text is right, every sequence ends, nothing leaks, nothing sticks.

The runner's KV is the oracle (`tests.fakes.kv_runner`): its next token depends on every slot read through the page
table. The grid of pools, rows and budgets includes the smallest that can run at all. Planted faults must be noticed.
"""

import random

import pytest

from tests.fakes.engine_rig import Rig
from tests.fakes.engine_traffic import Traffic
from tests.property.mutants_engine import MUTANTS

CASES = 16
MUTANT_CASES = 30


def when_of(rng):
    kind = rng.choice(("collect", "launch", "mixed"))
    inner = random.Random(rng.random())
    return (lambda step: inner.choice(("launch", "collect"))) if kind == "mixed" else (lambda step: kind)


def play(seed, passes=50):
    """One cell of the grid: settings, traffic and timing all follow from the seed."""
    rng = random.Random(seed)
    rig, traffic = (hot if seed % 3 == 2 else mixed)(rng, seed)
    for _ in range(passes):
        traffic.step()
    traffic.drain()
    return rig


def mixed(rng, seed):
    """Any settings, even tight ones."""
    size = rng.choice((1, 2, 4, 16))
    rig = Rig(
        page_tokens=size,
        num_pages=rng.choice((4, 7, 12, 20, 40, 80)),
        num_rows=rng.choice((1, 2, 3, 8)),
        chunk_tokens=max(size, rng.choice((4, 8, 16, 48))),
        horizon_tokens=rng.choice((0, 4, 16)),
        finish_reserve_pages=rng.choice((0, 8)),
        prefix_cache=rng.random() < 0.8,
        max_partial_prefills=rng.choice((1, 2, 4)),
        max_preempts=rng.choice((1, 3)),
        max_waiting=rng.choice((3, 50)),
        ring_tokens=rng.choice((0, 0, 0, 5)),
        when=when_of(rng),
    )
    longest = min(40, rig.engine.capacity.max_tokens_total - 1)
    return rig, Traffic(rig, seed, longest=longest, max_outputs=rng.choice((3, 24, 60)))


def hot(rng, seed):
    """Steps run as late as they can while pages change hands as fast as they can."""
    rig = Rig(
        page_tokens=rng.choice((1, 2)),
        num_pages=rng.choice((24, 40)),
        num_rows=8,
        chunk_tokens=16,
        horizon_tokens=0,
        finish_reserve_pages=0,
        prefix_cache=rng.random() < 0.5,
    )
    kinds = ("local", "handover", "handover")
    return rig, Traffic(rig, seed, kinds=kinds, longest=8, max_outputs=20, abort_rate=0.3, ask_rate=0.9)


@pytest.mark.parametrize("seed", range(CASES))
def test_every_text_is_right_and_nothing_leaks_or_sticks(seed):
    play(seed)


def test_the_grid_reaches_the_rare_paths():
    total = {"retractions": 0, "recomputed_tokens": 0, "cached_tokens": 0}
    failed = 0
    for seed in range(100, 103):
        rig = Rig(page_tokens=2, num_pages=12, num_rows=8, chunk_tokens=8, horizon_tokens=0, finish_reserve_pages=0)
        traffic = Traffic(rig, seed, longest=10, max_outputs=20)
        for _ in range(70):
            traffic.step()
        traffic.drain()
        for name in total:
            total[name] += rig.engine.statistics()[name]
        failed += len(rig.sink.failed)
    assert all(total.values()), total
    assert failed, "no sequence ever outgrew the pool"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_planted_fault_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(MUTANT_CASES):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} went unnoticed in {MUTANT_CASES} runs")
