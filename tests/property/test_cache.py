"""The cache against its oracle, and the proof that the comparison finds planted faults."""

import itertools

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from core.errors import InvariantError
from engine.cache.events import EventRecorder
from engine.cache.page_pool import PagePool
from engine.cache.prefix_tree import PrefixTree
from tests.property.cache_driver import CacheDriver, Draw
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


FEW = {
    "start a short chain": ("start", Draw(0, 9, flag=True, items=[0, 1])),
    "start a landing": ("start", Draw(4, 9, flag=False, items=[0, 0])),
    "compute and publish": ("compute", Draw(0, 6, flag=True, items=[0])),
    "compute the second": ("compute", Draw(1, 6, flag=True, items=[0])),
    "retire a step": ("retire", Draw(0, 0, flag=True, items=[0])),
    "finish the first": ("finish", Draw(0, 0, flag=True, items=[0])),
    "finish the second": ("finish", Draw(1, 0, flag=False, items=[0])),
    "evict": ("evict", Draw(0, 2, flag=True, items=[0])),
    "flush": ("flush", Draw(0, 0, flag=True, items=[0])),
    "end the writers": ("writers_end", Draw(0, 0, flag=True, items=[0])),
    "abandon the landing": ("abandon_landing", Draw(0, 0, flag=True, items=[0])),
    "prove": ("prove", Draw(0, 0, flag=True, items=[0])),
}


def run(names):
    """Run operations in a pool of 7 pages in which two sequences compute, a step is in flight, and a landing is open."""
    driver = CacheDriver(PagePool, PrefixTree, EventRecorder, num_pages=8)
    for name in ("start a short chain", "start a short chain", "compute and publish", "start a landing", *names):
        operation, draw = FEW[name]
        getattr(driver, operation)(draw)
    # What an operation breaks stays broken: one check at the end sees it.
    driver.check()
    driver.give_everything_back(Draw(0, 0, flag=True, items=[0]))


def test_every_order_of_three_operations_around_a_step_in_flight():
    for names in itertools.product(FEW, repeat=3):
        run(names)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_order_of_five_operations_around_a_step_in_flight():
    for names in itertools.product(FEW, repeat=5):
        run(names)


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
