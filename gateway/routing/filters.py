"""Which workers may be asked at all: boolean masks over slots. Pure; `now` is passed in."""

from collections.abc import Iterable

import numpy as np

from gateway.fleet import Bools, Fleet, Ints
from gateway.routing.job import Job, RoutingRules


def alive(fleet: Fleet, model: int, now: float) -> Bools:
    """Registered for this model, connected, READY, lease valid, breaker not open, no probe out."""
    return (
        fleet.used
        & fleet.ready
        & ~fleet.probing
        & (fleet.model == model)
        & (fleet.lease_until > now)
        & (fleet.open_until <= now)
    )


def not_in(fleet: Fleet, slots: Iterable[int]) -> Bools:
    """True but for the named slots."""
    mask = np.ones(fleet.capacity, dtype=np.bool_)
    named = [slot for slot in slots if 0 <= slot < fleet.capacity]
    mask[named] = False
    return mask


def fits(fleet: Fleet, num_tokens: int) -> Bools:
    """The sequence and one more token can ever fit there."""
    return fleet.max_tokens > num_tokens


def has_room(fleet: Fleet, rules: RoutingRules) -> Bools:
    """The queue of a decode worker is not beyond its bound."""
    return fleet.live_requests() < fleet.rows + rules.max_waiting_requests


def prefill_workers(fleet: Fleet, job: Job, now: float) -> Bools:
    """Prefill workers that may compute this prompt."""
    return (
        alive(fleet, job.model, now) & fleet.prefill & fits(fleet, job.num_tokens) & not_in(fleet, job.exclude_prefill)
    )


def pairs(fleet: Fleet, prefill: Ints, decode: Ints) -> Bools:
    """[P, D] which pairs can hand over at all: equal fingerprint, some common transport (or none told)."""
    same = fleet.fingerprint[prefill][:, None] == fleet.fingerprint[decode][None, :]
    left, right = fleet.transports[prefill][:, None], fleet.transports[decode][None, :]
    return same & ((left & right != 0) | (left == 0) | (right == 0))
