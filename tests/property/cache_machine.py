"""The state machine over `CacheDriver`: one weighted rule, so that every run mixes all operations.

(With a rule per operation, hypothesis disables about half of them in each run, and few runs get deep.)
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache.events import EventRecorder
from engine.cache.page_pool import PagePool
from engine.cache.prefix_tree import PrefixTree
from tests.property.cache_driver import WEIGHTS, CacheDriver, Draw

OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class CacheMachine(RuleBasedStateMachine):
    pool_type = PagePool
    tree_type = PrefixTree
    recorder_type = EventRecorder

    def __init__(self):
        super().__init__()
        self.driver = CacheDriver(self.pool_type, self.tree_type, self.recorder_type)

    @rule(
        operation=st.sampled_from(OPERATIONS),
        index=st.integers(0, 23),
        count=st.integers(0, 6),
        flag=st.booleans(),
        items=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    )
    def act(self, operation, index, count, flag, items):
        getattr(self.driver, operation)(Draw(index, count, flag, items))

    @invariant()
    def both_worlds_agree(self):
        self.driver.check()
