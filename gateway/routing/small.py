"""`gateway.routing.pairs` for a handful of workers, in plain numbers: the same decisions for a tenth of the time.

Below some twenty slots each array operation costs more than all of its elements do one by one. Every figure is
computed by the same operations in the same order as in `scorers` and `filters`, so that both agree to the last bit
and draw the same random numbers (`tests/property/test_small_routing.py`).
"""

import math
from dataclasses import dataclass

import numpy as np

from gateway.fleet import MODE_AUTO, MODE_LOCAL, MODE_REMOTE, Fleet
from gateway.routing import policies
from gateway.routing.job import NO_PAIR, NONE, Choice, CostTable, Job, Placement, RoutingRules, Shortage
from gateway.routing.picker import Picker

LARGEST = 16
"""Slots up to which this is the faster way."""
Rows = list[int]


class _Facts:
    """The fleet's arrays as lists, and the job beside them. One per decision."""

    def __init__(self, fleet: Fleet, job: Job, rules: RoutingRules, now: float) -> None:
        self.fleet, self.job, self.rules, self.now = fleet, job, rules, now
        self.matched: list[int] = job.matched.tolist()
        self.longest = max(self.matched, default=0)
        self.token_s: list[float] = fleet.token_s.tolist()
        self.rate: list[float] = fleet.rate.tolist()
        self.max_tokens: list[int] = fleet.max_tokens.tolist()
        self.mode: list[int] = fleet.mode.tolist()
        self.rows: list[int] = fleet.rows.tolist()
        self.own_requests: list[float] = fleet.own_requests.tolist()
        self.foreign_requests: list[float] = fleet.foreign_requests.tolist()
        self.own_s: list[float] = fleet.own_s.tolist()
        self.head_s: list[float] = fleet.head_s.tolist()
        self.head_since: list[float] = fleet.head_since.tolist()
        self.foreign_tokens: list[float] = fleet.foreign_tokens.tolist()
        self.base_s: list[float] = fleet.base_s.tolist()
        self.square_s: list[float] = fleet.square_s.tolist()
        self.replay_tokens: list[int] = fleet.replay_tokens.tolist()
        self.alive = _alive(fleet, job.model, now)

    def live(self, slot: int) -> float:
        """As `Fleet.live_requests`."""
        return self.own_requests[slot] + self.foreign_requests[slot]

    def token_seconds(self, slot: int) -> float:
        """As `scorers.token_seconds`."""
        measured = self.token_s[slot]
        if measured > 0:
            return measured
        reported = self.rate[slot]
        return 1.0 / (reported if reported > 0 else self.rules.prefill_tokens_per_s)

    def queue_seconds(self, slot: int, token_s: float) -> float:
        """As `scorers.queue_seconds`."""
        begun, head = self.now - self.head_since[slot], self.head_s[slot]
        begun = max(begun, 0.0)
        return self.own_s[slot] - min(begun, head) + self.foreign_tokens[slot] * token_s

    def compute_seconds(self, slot: int, matched: int, token_s: float) -> float:
        """As `scorers.compute_seconds`."""
        num_tokens, replayed = self.job.num_tokens, matched - self.replay_tokens[slot]
        uncached = float(num_tokens - replayed if replayed > 0 else num_tokens)
        uncached = max(uncached, 1.0)
        if self.token_s[slot] > 0:
            base, square = self.base_s[slot], self.square_s[slot]
        else:
            base, square = self.rules.base_s, self.rules.quadratic_s
        attention = square * uncached * (num_tokens - uncached / 2)
        return base + uncached * token_s + attention


def _alive(fleet: Fleet, model: int, now: float) -> Rows:
    facts = zip(
        fleet.used.tolist(),
        fleet.ready.tolist(),
        fleet.probing.tolist(),
        fleet.model.tolist(),
        fleet.lease_until.tolist(),
        fleet.open_until.tolist(),
        strict=True,
    )
    return [
        slot
        for slot, (used, ready, probing, serves, lease_until, open_until) in enumerate(facts)
        if used and ready and not probing and serves == model and lease_until > now and open_until <= now
    ]


@dataclass(slots=True)
class _Side:
    """What the prompt costs at each of these workers."""

    queue: list[float]
    compute: list[float]
    horizon: list[float]
    cost: list[float]


def choose_pair(fleet: Fleet, job: Job, rules: RoutingRules, picker: Picker, *, now: float) -> Placement:
    """Place one attempt by `rules.policy`, which is one that predicts."""
    facts = _Facts(fleet, job, rules, now)
    decode = _decode_workers(facts)
    if isinstance(decode, Shortage):
        return decode
    is_prefill: list[bool] = fleet.prefill.tolist()
    prefill = [
        slot
        for slot in facts.alive
        if is_prefill[slot] and facts.max_tokens[slot] > job.num_tokens and slot not in job.exclude_prefill
    ]
    return _cheapest(facts, picker, prefill, decode)


def _decode_workers(facts: _Facts) -> Rows | Shortage:
    """As `pairs._decode_workers`."""
    fleet, job = facts.fleet, facts.job
    is_decode: list[bool] = fleet.decode.tolist()
    up = [slot for slot in facts.alive if is_decode[slot]]
    if not up:
        return Shortage(role="decode", message="no decode worker is ready")
    fitting = [slot for slot in up if facts.max_tokens[slot] > job.num_tokens]
    if not fitting:
        known = (fleet.used & fleet.decode & (fleet.model == job.model)).nonzero()[0].tolist()
        largest = max(facts.max_tokens[slot] for slot in known)
        if largest <= job.num_tokens:
            return Shortage.does_not_fit(job.num_tokens, largest)
    free = [slot for slot in fitting if slot not in job.exclude_decode]
    if not free:
        return Shortage(role="decode", message="no further decode worker is ready")
    roomy = [slot for slot in free if facts.live(slot) < facts.rows[slot] + facts.rules.max_waiting_requests]
    return roomy or Shortage(role="capacity", message="the queues of all decode workers are full")


def _cheapest(facts: _Facts, picker: Picker, prefill: Rows, decode: Rows) -> Placement:
    """As `pairs._cheapest`, for a fleet that needs no shortlist."""
    rules = facts.rules
    knows = rules.policy == "prefix"
    held = [facts.matched[slot] if knows else 0 for slot in decode]
    slow = _decode_seconds(facts, decode, held)
    side, own = _prefill_side(facts, prefill), _prefill_side(facts, decode)
    pairs, move = _pairs(facts, prefill, decode), _move_seconds(facts, prefill, decode)
    costs: list[float] = []
    usable: list[bool] = []
    gains: list[int] = []
    for row, slot in enumerate(prefill):
        cost, matched = side.cost[row], facts.matched[slot]
        for column, seconds in enumerate(slow):
            costs.append(cost + move[row][column] + seconds)
            usable.append(pairs[row][column])
            gains.append(matched + held[column] if knows else 0)
    for column, slot in enumerate(decode):
        costs.append(own.cost[column] + slow[column])
        usable.append(_may_compute(facts, slot, any(row[column] for row in pairs)))
        gains.append(facts.matched[slot] + held[column] if knows else 0)
    if True not in usable:
        return NO_PAIR
    index = picker.best_of(
        costs, usable, gains, _affinity(facts, prefill, decode), share=rules.tie_share, margin=rules.tie_s
    )
    row, column = divmod(index, len(decode))
    is_alone = row == len(prefill)
    chosen = decode[column] if is_alone else prefill[row]
    at, there = (column, own) if is_alone else (row, side)
    return Choice(
        prefill=NONE if is_alone else chosen,
        decode=decode[column],
        seconds=costs[index],
        prefill_s=there.compute[at],
        wait_s=there.queue[at] + there.compute[at],
        matched_prefill=facts.matched[chosen],
        matched_decode=held[column],
        table=CostTable(
            prefill=[*prefill, decode[column]],
            queue_s=[*side.queue, own.queue[column]],
            compute_s=[*side.compute, own.compute[column]],
            horizon_s=[*side.horizon, own.horizon[column]],
            move_s=[*(seconds[column] for seconds in move), 0.0],
            matched=[*(facts.matched[slot] for slot in prefill), facts.matched[decode[column]]],
            decode=decode,
            slow_s=slow,
            held=held,
        ),
    )


def _may_compute(facts: _Facts, slot: int, is_paired: bool) -> bool:
    """As `pairs._may_compute`."""
    mode = facts.mode[slot]
    return mode in (MODE_LOCAL, MODE_AUTO) or (mode == MODE_REMOTE and facts.rules.local_fallback and not is_paired)


def _pairs(facts: _Facts, prefill: Rows, decode: Rows) -> list[list[bool]]:
    """[P][D] as `filters.pairs`, without decode workers that compute for themselves."""
    fingerprint: list[int] = facts.fleet.fingerprint.tolist()
    transports: list[int] = facts.fleet.transports.tolist()
    return [
        [
            fingerprint[left] == fingerprint[right]
            and (not transports[left] or not transports[right] or transports[left] & transports[right] != 0)
            and facts.mode[right] != MODE_LOCAL
            for right in decode
        ]
        for left in prefill
    ]


def _prefill_side(facts: _Facts, slots: Rows) -> _Side:
    rules = facts.rules
    queue: list[float] = []
    compute: list[float] = []
    nothing: list[float] = []
    knows = rules.policy == "prefix"
    for slot in slots:
        token_s = facts.token_seconds(slot)
        queue.append(facts.queue_seconds(slot, token_s))
        compute.append(facts.compute_seconds(slot, facts.matched[slot], token_s))
        if not knows:
            nothing.append(facts.compute_seconds(slot, 0, token_s))
    if knows:
        horizon = _horizon_seconds(facts, slots, compute)
    else:
        # Takes out again what a prefix saves: predictions stay true, the choice does not look at it.
        horizon = [whole - seconds for whole, seconds in zip(nothing, compute, strict=True)]
    cost = [a + b + c for a, b, c in zip(queue, compute, horizon, strict=True)]
    return _Side(queue, compute, horizon, cost)


def _horizon_seconds(facts: _Facts, slots: Rows, compute: list[float]) -> list[float]:
    """As `scorers.horizon_seconds`."""
    fleet, job, rules = facts.fleet, facts.job, facts.rules
    if facts.longest >= rules.continuing_share * job.num_tokens:
        return [rules.duplicate_weight * seconds for seconds in compute]
    share = min(job.continuing, 0.99)
    weight = rules.recent_weight * share / (1 - share)
    recent: list[float] = fleet.recent_s.tolist()
    found = [weight * recent[slot] for slot in slots]
    if not job.homes:
        return found
    room = {
        slot: job.cache_share * int(fleet.num_pages[slot]) * int(fleet.page_tokens[slot]) - job.homes.get(slot, 0.0)
        for slot in slots
    }
    return [
        seconds + max(job.num_tokens - room[slot], 0.0) * facts.token_seconds(slot)
        for slot, seconds in zip(slots, found, strict=True)
    ]


def _decode_seconds(facts: _Facts, slots: Rows, held: list[int]) -> list[float]:
    """As `scorers.decode_seconds`."""
    fleet, job, rules = facts.fleet, facts.job, facts.rules
    output = float(min(job.max_output, rules.expected_output_tokens))
    step_s: list[float] = fleet.step_s.tolist()
    sizes: list[int] = fleet.page_tokens.tolist()
    pages_free: list[int] = fleet.pages_free.tolist()
    found: list[float] = []
    for slot, matched in zip(slots, held, strict=True):
        whole = output * (step_s[slot] if step_s[slot] > 0 else rules.step_s)
        after, rows = facts.live(slot) + 1, facts.rows[slot] or 1
        slower = whole * min(after, rows) / rows
        row_wait = whole * (after - rows) / rows if after > rows else 0.0
        pages = math.ceil((job.num_tokens + output - matched) / (sizes[slot] or 1))
        missing = pages - pages_free[slot]
        found.append(slower + row_wait + whole * (missing / max(pages, 1) if missing > 0 else 0.0))
    return found


def _move_seconds(facts: _Facts, prefill: Rows, decode: Rows) -> list[list[float]]:
    """[P][D] as `scorers.move_seconds`."""
    job, link, domain = facts.job, facts.job.link, facts.fleet.domain.tolist()
    sizes = [max(job.num_tokens - facts.matched[slot], 0) * link.bytes_per_token for slot in decode]
    return [
        [
            size * (link.far_s if domain[left] != domain[right] else link.near_s)
            for right, size in zip(decode, sizes, strict=True)
        ]
        for left in prefill
    ]


def _affinity(facts: _Facts, prefill: Rows, decode: Rows) -> list[int]:
    """[(P + 1) * D] as `pairs._affinity`; empty: no preference."""
    if not facts.job.session:
        return []
    return policies.affinity(facts.fleet, np.array(prefill, np.int64), np.array(decode), facts.job).ravel().tolist()
