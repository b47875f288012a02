"""Chooses among candidates of equal cost. All that rotates or is random in routing lives here, injected."""

import random
from collections.abc import Sequence
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
        return int(candidates[self.random.randrange(len(candidates)) if len(candidates) > 1 else 0])

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

    def best_of(
        self,
        costs: Sequence[float],
        ok: Sequence[bool],
        gains: Sequence[int],
        affinity: Sequence[int],
        *,
        share: float,
        margin: float,
    ) -> int:
        """As `best`, for a handful of candidates in plain numbers; `affinity` may be empty."""
        usable = [index for index, is_ok in enumerate(ok) if is_ok]
        bound = min([costs[index] for index in usable]) * (1 + share) + margin
        near = [index for index in usable if costs[index] <= bound]
        if len(near) == 1:
            return near[0]
        most = max([gains[index] for index in near])
        near = [index for index in near if gains[index] == most]
        if affinity:
            best = max(affinity[index] for index in near)
            near = [index for index in near if affinity[index] == best]
        return near[self.random.randrange(len(near))] if len(near) > 1 else near[0]
