"""The cache against its oracle, and the proof that the comparison finds planted faults."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from core.errors import InvariantError
from engine.cache.events import EventRecorder
from engine.cache.page_pool import PagePool
from engine.cache.prefix_tree import PrefixTree
from tests.property.cache_machine import CacheMachine
from tests.property.mutants_cache import MUTANTS

STEPS = 250


def explore(machine, examples):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_pool_tree_and_events_agree_with_the_oracle():
    explore(CacheMachine, 15)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pool_tree_and_events_agree_with_the_oracle_for_long():
    explore(CacheMachine, 1000)


def mutated(mutant):
    slot = next(
        name
        for name, base in (("pool_type", PagePool), ("tree_type", PrefixTree), ("recorder_type", EventRecorder))
        if issubclass(mutant, base)
    )
    return type(f"CacheMachineWhich{mutant.__name__}", (CacheMachine,), {slot: mutant})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_machine_catches_a_cache_that(mutant):
    with pytest.raises((AssertionError, InvariantError)):
        explore(mutated(mutant), 40)


def test_there_are_enough_mutants_of_each_part():
    assert len(MUTANTS) >= 30
    for base, least in ((PagePool, 11), (PrefixTree, 11), (EventRecorder, 5)):
        assert sum(issubclass(mutant, base) for mutant in MUTANTS) >= least
