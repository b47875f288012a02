"""Random traffic with replay: every text is what its floors demand, whatever was cached, retracted or handed over."""

import random

import pytest

from tests.fakes.replay_traffic import ReplayTraffic
from tests.property.mutants_replay import MUTANTS

ROOMY = {}
TIGHT = {"num_pages": 26, "num_rows": 4, "chunk_tokens": 12, "horizon_tokens": 0, "finish_reserve_pages": 0}
BARE = {"other": {"prefix_cache": False, "chunk_tokens": 11}}


def drive(seed, steps, settings):
    traffic = ReplayTraffic(seed, **settings)
    for _ in range(steps):
        traffic.step()
        if len(traffic.waiting) > 8:
            traffic.settle()
    traffic.drain()
    return traffic


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [ROOMY, TIGHT, BARE], ids=["roomy", "tight", "bare"])
def test_every_text_is_what_its_floors_demand(seed, settings):
    drive(seed, 40, settings)


@pytest.mark.parametrize("seed", range(6))
def test_with_drafts_too(seed):
    inner = random.Random(seed)
    drafts = {"num_drafts": (2, 5)[seed % 2], "is_right": lambda: inner.random() < 0.7}
    traffic = drive(seed, 40, {**(ROOMY, TIGHT)[seed // 2 % 2], **drafts})
    assert all(rig.engine.statistics()["drafts_accepted"] for rig in traffic.rigs)


def test_the_traffic_reaches_hits_behind_hits():
    assert drive(0, 40, ROOMY).most_hits >= 3


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_fault_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(8):
        try:
            drive(seed, 40, (ROOMY, TIGHT)[seed % 2])
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} went unnoticed")
