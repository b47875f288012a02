"""Chooses a prefill and a decode worker together, or says why there is none.

Pure over the fleet's arrays (only the picker rotates). A pair's cost is queue + compute + horizon at P, the move
between the two, and the slow-down at D; the decode worker alone (no P) is one more candidate where its mode allows.
Beyond `shortlist` workers of a kind only the cheapest are paired.
"""

from typing import NamedTuple

import numpy as np

from gateway.fleet import MODE_AUTO, MODE_LOCAL, MODE_REMOTE, Bools, Fleet, Floats, Ints
from gateway.routing import filters, policies, scorers, small
from gateway.routing.job import NO_PAIR, NONE, Choice, CostTable, Job, Placement, RoutingRules, Shortage
from gateway.routing.picker import Picker

PREDICTING = ("prefix", "least_loaded")
POLICIES = (*PREDICTING, *policies.POLICIES)


def choose_pair(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float) -> Placement:
    """Place one attempt by `rules.policy`."""
    if rules.policy in PREDICTING and fleet.capacity <= min(small.LARGEST, rules.shortlist):
        return small.choose_pair(fleet, job, rules, picker, now=now)
    return choose_by_arrays(fleet, job, rules, picker, now=now)


def choose_by_arrays(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float) -> Placement:
    """As `choose_pair`, for fleets of any size."""
    decode = _decode_workers(fleet, job, rules, now)
    if isinstance(decode, Shortage):
        return decode
    prefill = np.flatnonzero(filters.prefill_workers(fleet, job, now))
    if rules.policy in PREDICTING:
        return _cheapest(fleet, job, rules, picker, prefill=prefill, decode=decode, now=now)
    return _one_by_one(fleet, job, rules, picker, prefill=prefill, decode=decode, now=now)


def choose_prefill(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float, decode: int) -> int:
    """Return another prefill worker for a request that stays at `decode`, or `NONE`."""
    prefill = np.flatnonzero(filters.prefill_workers(fleet, job, now))
    prefill = prefill[filters.pairs(fleet, prefill, np.array([decode]))[:, 0]]
    if not len(prefill):
        return NONE
    if rules.policy not in PREDICTING:
        return policies.POLICIES[rules.policy](policies.Ask(fleet, prefill, job, rules, picker, now))
    side = _prefill_side(fleet, prefill, job, rules, now)
    cost = side.cost + scorers.move_seconds(fleet, prefill, np.array([decode]), job)[:, 0]
    everyone, equal = np.ones(len(prefill), dtype=np.bool_), np.zeros(len(prefill), dtype=np.int64)
    gain = side.matched if rules.policy == "prefix" else equal
    best = picker.best(cost, everyone, gain, equal, share=rules.tie_share, margin=rules.tie_s)
    return int(prefill[best])


def _decode_workers(fleet: Fleet, job: Job, rules: RoutingRules, now: float) -> Ints | Shortage:
    """Slots of decode workers that may own the request, or why there are none."""
    known = fleet.used & fleet.decode & (fleet.model == job.model)
    up = filters.alive(fleet, job.model, now) & fleet.decode
    if not up.any():
        return Shortage(role="decode", message="no decode worker is ready")
    fitting = filters.fits(fleet, job.num_tokens)
    if not (known & fitting).any():
        largest = int(fleet.max_tokens[known].max())
        return Shortage.does_not_fit(job.num_tokens, largest)
    free = up & fitting & filters.not_in(fleet, job.exclude_decode)
    if not free.any():
        return Shortage(role="decode", message="no further decode worker is ready")
    roomy = free & filters.has_room(fleet, rules)
    if not roomy.any():
        return Shortage(role="capacity", message="the queues of all decode workers are full")
    return np.flatnonzero(roomy)


def _may_compute(fleet: Fleet, decode: Ints, rules: RoutingRules, paired: Bools) -> Bools:
    """[D] which decode workers may compute the prompt themselves: by mode, or as a fallback when nobody pairs."""
    mode = fleet.mode[decode]
    return (mode == MODE_LOCAL) | (mode == MODE_AUTO) | ((mode == MODE_REMOTE) & rules.local_fallback & ~paired)


def _one_by_one(
    fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, prefill: Ints, decode: Ints, now: float
) -> Placement:
    """Choose a decode worker first, then a prefill worker that pairs with it, each by the policy alone."""
    ok = filters.pairs(fleet, prefill, decode) & (fleet.mode[decode] != MODE_LOCAL)[None, :]
    paired = ok.any(axis=0)
    usable = np.flatnonzero(paired | _may_compute(fleet, decode, rules, paired))
    if not len(usable):
        return NO_PAIR
    policy = policies.POLICIES[rules.policy]
    # Where the decode worker computes the prompt it is what the policy is about; else the least busy one will do.
    alone = not paired[usable].any() or rules.policy in ("random", "round_robin")
    for_decode = policy if alone else policies.least_busy
    ask = policies.Ask(fleet, decode[usable], job, rules, picker, now)
    slot = for_decode(ask)
    rows = prefill[ok[:, int(np.flatnonzero(decode == slot)[0])]]
    chosen = NONE
    if len(rows):
        # One counter turns both: without the division a rotation over two and two would only ever use two pairs.
        turn = picker.counter // len(usable) % len(rows)
        chosen = int(rows[turn]) if rules.policy == "round_robin" else policy(ask._replace(slots=rows))
    at = np.array([slot if chosen == NONE else chosen])
    compute = float(scorers.compute_seconds(fleet, at, job, job.matched[at], rules)[0])
    return Choice(
        prefill=chosen,
        decode=slot,
        seconds=compute,
        prefill_s=compute,
        wait_s=compute + float(scorers.queue_seconds(fleet, at, rules, now)[0]),
        matched_prefill=int(job.matched[at[0]]),
        matched_decode=int(job.matched[slot]),
    )


class _Side(NamedTuple):
    """[n] what the prompt costs at each of these workers."""

    queue: Floats
    compute: Floats
    horizon: Floats
    matched: Ints

    @property
    def cost(self) -> Floats:
        """[n] all of it."""
        return self.queue + self.compute + self.horizon

    def take(self, rows: Ints) -> "_Side":
        """Return it for some of them."""
        return _Side(self.queue[rows], self.compute[rows], self.horizon[rows], self.matched[rows])

    def join(self, other: "_Side") -> "_Side":
        """Return it with other workers behind."""
        return _Side(
            np.append(self.queue, other.queue),
            np.append(self.compute, other.compute),
            np.append(self.horizon, other.horizon),
            np.append(self.matched, other.matched),
        )


def _prefill_side(fleet: Fleet, slots: Ints, job: Job, rules: RoutingRules, now: float) -> _Side:
    matched = job.matched[slots]
    compute = scorers.compute_seconds(fleet, slots, job, matched, rules)
    if rules.policy == "prefix":
        horizon = scorers.horizon_seconds(fleet, slots, job, compute, rules)
    else:
        # Takes out again what a prefix saves: predictions stay true, the choice does not look at it.
        horizon = scorers.compute_seconds(fleet, slots, job, np.zeros_like(matched), rules) - compute
    return _Side(scorers.queue_seconds(fleet, slots, rules, now), compute, horizon, matched)


def _cheapest(
    fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, prefill: Ints, decode: Ints, now: float
) -> Placement:
    knows = int(rules.policy == "prefix")
    held = knows * job.matched[decode]
    slow = scorers.decode_seconds(fleet, decode, job, held, rules)
    if len(decode) > rules.shortlist:
        best = np.argpartition(slow, rules.shortlist)[: rules.shortlist]
        decode, held, slow = decode[best], held[best], slow[best]
    side = _prefill_side(fleet, prefill, job, rules, now)
    if len(prefill) > rules.shortlist:
        best = np.argpartition(side.cost, rules.shortlist)[: rules.shortlist]
        prefill, side = prefill[best], side.take(best)
    ok = filters.pairs(fleet, prefill, decode) & (fleet.mode[decode] != MODE_LOCAL)[None, :]
    paired = ok.any(axis=0)
    own = _prefill_side(fleet, decode, job, rules, now)
    move = scorers.move_seconds(fleet, prefill, decode, job)
    # One more row: the decode worker computes the prompt itself.
    total = np.vstack([side.cost[:, None] + move + slow[None, :], own.cost + slow])
    ok = np.vstack([ok, _may_compute(fleet, decode, rules, paired)])
    if not ok.any():
        return NO_PAIR
    index = picker.best(
        total.ravel(),
        ok.ravel(),
        knows * np.vstack([side.matched[:, None] + held[None, :], own.matched + held]).ravel(),
        _affinity(fleet, prefill, decode, job).ravel(),
        share=rules.tie_share,
        margin=rules.tie_s,
    )
    row, column = divmod(index, len(decode))
    both = side.join(own.take(np.array([column])))
    return Choice(
        prefill=NONE if row == len(prefill) else int(prefill[row]),
        decode=int(decode[column]),
        seconds=float(total[row, column]),
        prefill_s=float(both.compute[row]),
        wait_s=float(both.queue[row] + both.compute[row]),
        matched_prefill=int(both.matched[row]),
        matched_decode=int(held[column]),
        table=CostTable(
            prefill=np.append(prefill, decode[column]),
            queue_s=both.queue,
            compute_s=both.compute,
            horizon_s=both.horizon,
            move_s=np.append(move[:, column], 0.0),
            matched=both.matched,
            decode=decode,
            slow_s=slow,
            held=held,
        ),
    )


def _affinity(fleet: Fleet, prefill: Ints, decode: Ints, job: Job) -> Ints:
    """[P + 1, D] as `policies.affinity`; zero without a session."""
    if not job.session:
        return np.zeros((len(prefill) + 1, len(decode)), dtype=np.int64)
    return policies.affinity(fleet, prefill, decode, job)
