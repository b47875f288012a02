"""Invariants of the model page that wait for later issues: named here, so that nobody forgets them."""

import pytest


@pytest.mark.skip(reason="I8: tensor- and expert-parallel execution is a later issue; only the sharding plan exists")
def test_i8_parallel_execution_equals_a_single_rank():
    raise NotImplementedError


@pytest.mark.skip(reason="I9: CUDA graphs are a later issue")
def test_i9_graph_replay_equals_eager_execution():
    raise NotImplementedError
