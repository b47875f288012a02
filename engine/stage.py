"""Stages of a prefill: stretches of rows that are computed with one window floor. Pure.

Usually there is one: everything, or what lies behind a hit and the rows replayed before it. A sequence whose floors are
fixed and whose hit is gone computes that hit first, just as it was computed before: one stage per hit of its floors.
"""

from dataclasses import dataclass

from engine.cache.hit import ReuseRule


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached pages that a sequence may build on, and the hits that they were computed behind."""

    hits: tuple[int, ...]
    num_pages: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows [start, end) of one sequence. Windows do not reach below `floor`, and nothing is written below `write_from`."""

    start: int = 0
    end: int = 0
    floor: int = 0
    write_from: int = 0


WHOLE = Stage()
"""Nothing is replayed."""


def next_stage(rule: ReuseRule, hits: tuple[int, ...], held: int, goal: int) -> Stage:
    """Return what comes after `held` tokens are in pages: up to the next hit, or to the goal.

    `held` is a hit of `hits`, or 0; without replay any length.
    """
    if not rule.replays:
        return Stage(start=held, end=goal)
    end = next((hit for hit in hits if hit > held), goal)
    if not held:
        return Stage(end=end)
    floor = rule.encoder_floor(held)
    return Stage(start=floor, end=end, floor=floor, write_from=held)
