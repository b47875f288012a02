"""Chooses among candidates of equal cost. All that rotates or is random in routing lives here, injected."""

import random
from dataclasses import dataclass, field

import numpy as np

from gateway.fleet import Bools, Floats, Ints


@dataclass(slots=True)
class Picker:
    """A counter and a generator. Several gateway processes must not share the seed, or they stampede together."""

    random: random.Random
    counter: int = field(default=0)

    def rotate(self, candidates: Ints) -> int:
        """Return the next of the candidates in turn."""
        choice = int(candidates[self.counter % len(candidates)])
        self.counter += 1
        return choice

    def any(self, candidates: Ints) -> int:
        """Return one of the candidates at random."""
        return int(candidates[self.random.randrange(len(candidates))])

    def best(self, cost: Floats, ok: Bools, gain: Ints, affinity: Ints, *, share: float, margin: float) -> int:
        """Return the index of the cheapest candidate that is `ok`.

        Among those within `best * (1 + share) + margin` the largest `gain` wins, then the largest `affinity`
        (all zero: no preference), then chance: gateways that rotate in step would all choose the same. At least one must be ok.
        """
        usable = np.flatnonzero(ok)
        costs = cost[usable]
        lowest = costs.min()
        near = usable[costs <= lowest * (1 + share) + margin]
        near = near[gain[near] == gain[near].max()]
        near = near[affinity[near] == affinity[near].max()]
        return self.any(near)
