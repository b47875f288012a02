"""Random traffic with drafts: the same texts as without, under any pattern of acceptance, pressure and timing.

Everything that `test_engine_traffic` demands, with a runner that verifies drafts of which a scripted share is right.
Planted faults of speculation must be noticed.
"""

import random

import pytest

from tests.fakes.engine_rig import Rig
from tests.fakes.engine_traffic import Traffic
from tests.property.mutants_engine import MUTANTS as PLAIN_MUTANTS
from tests.property.mutants_speculation import MUTANTS

CASES = 16
MUTANT_CASES = 40
STILL_MEANT = {
    "pages_are_freed_without_a_fence",
    "growth_comes_a_token_late",
    "a_landed_row_is_not_set_up",
    "retraction_forgets_outputs",
    "stops_are_ignored",
}


def rights(rng):
    """How drafts fare: never, always, or by chance."""
    share, inner = rng.choice((0.0, 0.5, 0.8, 1.0)), random.Random(rng.random())
    return lambda: inner.random() < share


def timing(rng):
    inner, kind = random.Random(rng.random()), rng.choice(("collect", "launch", "mixed"))
    return lambda step: inner.choice(("collect", "launch")) if kind == "mixed" else kind


def play(seed, passes=50):
    """Settings, traffic, timing and the fate of drafts all follow from the seed."""
    rng = random.Random(seed)
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
        ring_tokens=rng.choice((0, 0, 5)),
        max_positions=rng.choice((4096, 4096, 30)),
        when=timing(rng),
        num_drafts=rng.choice((1, 2, 5)),
        is_right=rights(rng),
    )
    longest = min(40, rig.engine.capacity.max_tokens_total - 1)
    kinds = ("local", "source", "handover") if seed % 2 else ("local", "handover")
    abort_rate = 0.3 if seed % 3 == 2 else 0.05
    traffic = Traffic(
        rig, seed, kinds=kinds, longest=longest, max_outputs=rng.choice((3, 24, 60)), abort_rate=abort_rate
    )
    for _ in range(passes):
        traffic.step()
    traffic.drain()
    return rig


@pytest.mark.parametrize("seed", range(CASES))
def test_every_text_is_right_and_nothing_leaks_or_sticks(seed):
    play(seed)


def test_the_grid_reaches_acceptance_rejection_and_retraction():
    total = {"drafts_verified": 0, "drafts_accepted": 0, "drafts_accepted_at_0": 0, "retractions": 0}
    failed = 0
    for seed in range(200, 206):
        inner = random.Random(seed)
        rig = Rig(
            page_tokens=2,
            num_pages=14,
            num_rows=8,
            chunk_tokens=8,
            horizon_tokens=0,
            finish_reserve_pages=0,
            num_drafts=3,
            is_right=lambda inner=inner: inner.random() < 0.7,
        )
        traffic = Traffic(rig, seed, longest=10, max_outputs=20)
        for _ in range(70):
            traffic.step()
        traffic.drain()
        for name in total:
            total[name] += rig.engine.statistics()[name]
        failed += len(rig.sink.failed)
    assert all(total.values()), total
    assert total["drafts_accepted_at_0"] < total["drafts_accepted"] < total["drafts_verified"]
    assert failed, "no sequence ever outgrew the pool"


@pytest.mark.parametrize(
    "mutant", [*MUTANTS, *(m for m in PLAIN_MUTANTS if m.__name__ in STILL_MEANT)], ids=lambda m: m.__name__
)
def test_a_planted_fault_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(MUTANT_CASES):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} went unnoticed in {MUTANT_CASES} runs")
