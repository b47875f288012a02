"""In which steps one revision of the workers replaces another: pure counts, the same for every place.

Workers of different revisions may have different fingerprints and are then never paired, so both pools move together: in
each step new workers come first (surge), and as many old ones leave only when these serve. The new pools rise by the
share that is done, rounded up; the old ones fall by it, rounded up too, so neither revision ever has one role only.
"""

from collections.abc import Mapping
from math import ceil

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Workers by role: first `new` of the new revision serve, then `old` of the old one stay."""

    new: Mapping[str, int]
    old: Mapping[str, int]


def rollout_steps(want: Mapping[str, int], surge: int = 1) -> list[Step]:
    """Return the steps for pools of `want` workers (role -> count) with at most `surge` more of the largest pool at a time."""
    assert surge >= 1, "without surge a rollout would go below the floor"
    count = ceil(max(want.values(), default=0) / surge)
    return [
        Step(
            new={role: -(-size * done // count) for role, size in want.items()},
            old={role: -(-size * (count - done) // count) for role, size in want.items()},
        )
        for done in range(1, count + 1)
    ]
