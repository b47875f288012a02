"""Every size of the suite of kernels is one that its case can make."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_trials import case_of
from benchmarks.kernels_k import SETS, trials

MOST = {"t": 24, "b": 4, "n": 600, "d": 128, "i": 64, "rows": 60, "v": 600, "vocab": 600, "zipf": 300, "records": 30}
OF_OP = {
    "plain_linear": {},
    "block_scores": {"n": 1024, "k": 20},
    "block_entries": {},
    "experts_up": {"zipf": 120},
    "experts_down": {"zipf": 120},
    "sparse_attention": {"rows": 6},
}


def shrunk(trial):
    most = MOST | OF_OP.get(trial["op"], {})
    return {key: min(value, most.get(key, value)) for key, value in trial["size"].items() if key != "host"}


@pytest.mark.parametrize("name", SETS)
def test_a_case_makes_every_size_of_a_set(name):
    made = set()
    for trial in trials(name):
        case, size = case_of(trial), shrunk(trial)
        assert case.op == trial["op"]
        assert set(trial.get("check", trial["size"])) == set(trial["size"])
        if (key := (case.op, *sorted(size.items()))) in made:
            continue
        made.add(key)
        inputs = case.make(torch.Generator().manual_seed(1), size)
        assert inputs.least_bytes > 0


def rows_of(size):
    inputs = case_of({"op": "experts_up", "size": size}).make(torch.Generator().manual_seed(1), size)
    return inputs.args[3].diff().tolist()


def test_uneven_routes_have_the_shares_that_they_are_named_for():
    size = {"t": 1000, "k": 1, "e": 10, "d": 128, "i": 64}
    assert rows_of(size | {"skew": 180})[0] == pytest.approx(180, abs=2)
    assert max(rows_of(size | {"skew": 180})[1:]) < 100
    falling = rows_of(size | {"zipf": 120})
    assert falling[0] / falling[1] == pytest.approx(2**1.2, rel=0.05)
    assert sum(falling) == pytest.approx(1000, abs=1)


def test_frequent_ids_are_looked_up_often():
    size = {"t": 4000, "w": 32, "c": 6, "rows": 50, "shards": 1, "zipf": 1000}
    ngrams = case_of({"op": "engram_lookup", "size": size}).make(torch.Generator().manual_seed(1), size).args[0]
    assert (ngrams[:, 0] < 31).float().mean() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(ngrams[1:, 1], ngrams[:-1, 0])
