"""Chooses a prefill and a decode worker together, or says why there is none.

Pure over the fleet's arrays (only the picker rotates). A pair's cost is queue + compute + horizon at P, the move
between the two, and the slow-down at D; the decode worker alone (no P) is one more candidate where its mode allows.
Beyond `shortlist` workers of a kind only the cheapest are paired.
"""

import numpy as np

from gateway.fleet import MODE_AUTO, MODE_LOCAL, MODE_REMOTE, Bools, Fleet, Floats, Ints
from gateway.routing import filters, scorers
from gateway.routing.job import NONE, Choice, Job, Placement, RoutingRules, Shortage
from gateway.routing.picker import Picker

POLICIES = ("prefix", "least_loaded", "round_robin", "random")


def choose_pair(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float) -> Placement:
    """Place one attempt by `rules.policy`."""
    decode = _decode_workers(fleet, job, rules, now)
    if isinstance(decode, Shortage):
        return decode
    prefill = np.flatnonzero(filters.prefill_workers(fleet, job, now))
    if rules.policy in ("round_robin", "random"):
        return _simple(fleet, prefill, decode, rules, picker)
    return _cheapest(fleet, job, rules, picker, prefill=prefill, decode=decode)


def choose_prefill(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float, decode: int) -> int:
    """Return another prefill worker for a request that stays at `decode`, or `NONE`."""
    prefill = np.flatnonzero(filters.prefill_workers(fleet, job, now))
    prefill = prefill[filters.pairs(fleet, prefill, np.array([decode]))[:, 0]]
    if not len(prefill):
        return NONE
    if rules.policy == "random":
        return picker.any(prefill)
    if rules.policy == "round_robin":
        return picker.rotate(prefill)
    cost, matched, _ = _prefill_cost(fleet, prefill, job, rules)
    cost = cost + scorers.move_seconds(fleet, prefill, np.array([decode]), job, rules)[:, 0]
    best = picker.best(
        cost,
        np.ones(len(prefill), dtype=np.bool_),
        matched,
        np.zeros(len(prefill), dtype=np.int64),
        share=rules.tie_share,
        margin=rules.tie_s,
    )
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
        return Shortage(
            role="fits",
            largest=largest,
            message=f"the sequence has {job.num_tokens} tokens; this deployment fits at most {largest - 1} "
            "before the next output token",
        )
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


_NO_PAIR = Shortage(role="prefill", message="no prefill worker that matches a ready decode worker is ready")


def _simple(fleet: Fleet, prefill: Ints, decode: Ints, rules: RoutingRules, picker: Picker) -> Placement:
    """Decode and prefill worker by turns or at random, whatever they hold or do."""
    ok = filters.pairs(fleet, prefill, decode) & (fleet.mode[decode] != MODE_LOCAL)[None, :]
    paired = ok.any(axis=0)
    usable = np.flatnonzero(paired | _may_compute(fleet, decode, rules, paired))
    if not len(usable):
        return _NO_PAIR
    take = picker.any if rules.policy == "random" else picker.rotate
    column = take(usable)
    rows = prefill[ok[:, column]]
    # One counter turns both: without the division a rotation over two and two would only ever use two pairs.
    chosen = NONE
    if len(rows):
        chosen = picker.any(rows) if rules.policy == "random" else int(rows[picker.counter // len(usable) % len(rows)])
    return Choice(prefill=chosen, decode=int(decode[column]), seconds=0.0, prefill_s=0.0)


def _prefill_cost(fleet: Fleet, slots: Ints, job: Job, rules: RoutingRules) -> tuple[Floats, Ints, Floats]:
    """[n] cost, matched tokens and compute time of the prompt at these workers."""
    matched = job.matched[slots] if rules.policy == "prefix" else np.zeros(len(slots), dtype=np.int64)
    compute = scorers.compute_seconds(fleet, slots, job, matched, rules)
    cost = scorers.queue_seconds(fleet, slots, rules) + compute
    if rules.policy == "prefix":
        cost = cost + scorers.horizon_seconds(fleet, slots, job, compute, rules)
    return cost, matched, compute


def _cheapest(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, prefill: Ints, decode: Ints) -> Placement:
    held = job.matched[decode] if rules.policy == "prefix" else np.zeros(len(decode), dtype=np.int64)
    slow = scorers.decode_seconds(fleet, decode, job, held, rules)
    if len(decode) > rules.shortlist:
        best = np.argpartition(slow, rules.shortlist)[: rules.shortlist]
        decode, held, slow = decode[best], held[best], slow[best]
    cost, matched, compute = _prefill_cost(fleet, prefill, job, rules)
    if len(prefill) > rules.shortlist:
        best = np.argpartition(cost, rules.shortlist)[: rules.shortlist]
        prefill, cost, matched, compute = prefill[best], cost[best], matched[best], compute[best]
    ok = filters.pairs(fleet, prefill, decode) & (fleet.mode[decode] != MODE_LOCAL)[None, :]
    paired = ok.any(axis=0)
    own_cost, own_matched, own_compute = _prefill_cost(fleet, decode, job, rules)
    # One more row: the decode worker computes the prompt itself.
    total = np.vstack(
        [cost[:, None] + scorers.move_seconds(fleet, prefill, decode, job, rules) + slow[None, :], own_cost + slow]
    )
    ok = np.vstack([ok, _may_compute(fleet, decode, rules, paired)])
    if not ok.any():
        return _NO_PAIR
    gain = np.vstack([matched[:, None] + held[None, :], own_matched + held])
    index = picker.best(
        total.ravel(),
        ok.ravel(),
        gain.ravel(),
        _affinity(fleet, prefill, decode, job).ravel(),
        share=rules.tie_share,
        margin=rules.tie_s,
    )
    row, column = divmod(index, len(decode))
    local = row == len(prefill)
    return Choice(
        prefill=NONE if local else int(prefill[row]),
        decode=int(decode[column]),
        seconds=float(total[row, column]),
        prefill_s=float(own_compute[column] if local else compute[row]),
        matched_prefill=int(own_matched[column] if local else matched[row]),
        matched_decode=int(held[column]),
    )


def _affinity(fleet: Fleet, prefill: Ints, decode: Ints, job: Job) -> Ints:
    """[P + 1, D] preference of a session among equal pairs: rendezvous hashing over workers' names, no state."""
    shape = (len(prefill) + 1, len(decode))
    if not job.session:
        return np.zeros(shape, dtype=np.int64)
    left = _mix(np.append(fleet.key[prefill], 0), job.session)
    right = _mix(fleet.key[decode], job.session)
    return left[:, None] + right[None, :]


def _mix(keys: Ints, session: int) -> Ints:
    """31-bit mixture of each key with the session's hash (multiply and fold, wrapping on purpose)."""
    mixed = (keys.astype(np.uint64) ^ np.uint64(session & 0xFFFFFFFF)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(33)).astype(np.int64)
