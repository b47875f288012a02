"""Policies that look at prefill workers one by one: simple ones, and those of other routers, to compare with ours.

Each returns the slot of one candidate. Written from public descriptions of the peers' formulas, in
our units: a prompt's load is what this gateway sent and what reports add.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gateway.fleet import Fleet, Floats, Ints
from gateway.routing import scorers
from gateway.routing.job import Job, RoutingRules
from gateway.routing.picker import Picker


class Ask(NamedTuple):
    """The candidates, and all there is to look at."""

    fleet: Fleet
    slots: Ints
    job: Job
    rules: RoutingRules
    picker: Picker
    now: float


Policy = Callable[[Ask], int]

BALANCE_GAP, BALANCE_RATIO, CACHE_SHARE = 64, 1.5, 0.3
"""Defaults of `cache_aware`: requests of difference and ratio that mean imbalance, share that means a hit."""
PREFIX_WEIGHT, QUEUE_WEIGHT, SPACE_WEIGHT = 3.0, 2.0, 2.0
AFFINE_SHARE, AFFINITY_COST_S = 0.8, 5.0


def random(ask: Ask) -> int:
    """Any."""
    return ask.picker.any(ask.slots)


def round_robin(ask: Ask) -> int:
    """By turns."""
    return ask.picker.rotate(ask.slots)


def least_requests(ask: Ask) -> int:
    """The fewest prompts under way, whatever their length."""
    return _lowest(ask.slots, ask.fleet.own_prompts[ask.slots], ask.picker)


def power_of_two(ask: Ask) -> int:
    """The less busy of two at random."""
    pair = np.array([ask.picker.any(ask.slots), ask.picker.any(ask.slots)])
    return least_requests(ask._replace(slots=pair))


def consistent_hash(ask: Ask) -> int:
    """By the session, else by the first pages: highest random weight over workers' names."""
    return int(ask.slots[np.argmax(mix(ask.fleet.key[ask.slots], ask.job.session or ask.job.head))])


def cache_aware(ask: Ask) -> int:
    """SGLang's router: the longest prefix if it is a third of the prompt, unless request counts are far apart."""
    load, matched = ask.fleet.own_prompts[ask.slots], ask.job.matched[ask.slots]
    gap = load.max() - load.min()
    unbalanced = gap > BALANCE_GAP and load.max() > BALANCE_RATIO * load.min()
    if unbalanced or matched.max() <= CACHE_SHARE * ask.job.num_tokens:
        return least_requests(ask)
    return int(ask.slots[np.argmax(matched)])


def overlap_cost(ask: Ask) -> int:
    """Dynamo's linear cost: tokens waiting there and new ones of this prompt."""
    waiting = ask.fleet.own_tokens[ask.slots] + ask.fleet.foreign_tokens[ask.slots]
    return _lowest(ask.slots, waiting + ask.job.num_tokens - ask.job.matched[ask.slots], ask.picker)


def weighted_scores(ask: Ask) -> int:
    """llm-d's guide: prefix 3, queue 2, free pages 2, each a share between 0 and 1."""
    queue = ask.fleet.own_prompts[ask.slots]
    short = (queue.max() - queue) / max(float(np.ptp(queue)), 1e-9) if np.ptp(queue) else np.ones(len(ask.slots))
    space = ask.fleet.pages_free[ask.slots] / np.maximum(ask.fleet.num_pages[ask.slots], 1)
    score = (
        PREFIX_WEIGHT * ask.job.matched[ask.slots] / ask.job.num_tokens + QUEUE_WEIGHT * short + SPACE_WEIGHT * space
    )
    return _lowest(ask.slots, -score, ask.picker)


def affinity_filter(ask: Ask) -> int:
    """llm-d's other guide: who holds four fifths, unless its predicted wait is 5 s longer; among them the shortest wait."""
    matched = ask.job.matched[ask.slots]
    wait = scorers.queue_seconds(ask.fleet, ask.slots, ask.rules, ask.now) + _compute(ask)
    affine = matched >= AFFINE_SHARE * ask.job.num_tokens
    if affine.any() and wait[affine].min() <= wait.min() + AFFINITY_COST_S:
        return _lowest(ask.slots[affine], wait[affine], ask.picker)
    return _lowest(ask.slots, wait, ask.picker)


def exploit_explore(ask: Ask) -> int:
    """Preble's E2: the longest prefix if it is more than the rest, else the least work given lately."""
    matched = ask.job.matched[ask.slots]
    if 2 * matched.max() > ask.job.num_tokens:
        return _lowest(ask.slots, -matched.astype(np.float64), ask.picker)
    return _lowest(ask.slots, ask.fleet.recent_s[ask.slots] + _compute(ask), ask.picker)


def least_busy(ask: Ask) -> int:
    """The decode worker with the fewest live requests for its rows."""
    return _lowest(
        ask.slots, ask.fleet.live_requests()[ask.slots] / np.maximum(ask.fleet.rows[ask.slots], 1), ask.picker
    )


POLICIES: dict[str, Policy] = {
    "random": random,
    "round_robin": round_robin,
    "least_requests": least_requests,
    "power_of_two": power_of_two,
    "consistent_hash": consistent_hash,
    "cache_aware": cache_aware,
    "overlap_cost": overlap_cost,
    "weighted_scores": weighted_scores,
    "affinity_filter": affinity_filter,
    "exploit_explore": exploit_explore,
}


def _compute(ask: Ask) -> Floats:
    return scorers.compute_seconds(ask.fleet, ask.slots, ask.job, ask.job.matched[ask.slots], ask.rules)


def _lowest(slots: Ints, cost: Floats, picker: Picker) -> int:
    return picker.any(slots[cost <= cost.min() + 1e-9])


def affinity(fleet: Fleet, prefill: Ints, decode: Ints, job: Job) -> Ints:
    """[P + 1, D] preference of a session among equal pairs: rendezvous hashing over workers' names, no state."""
    left = mix(np.append(fleet.key[prefill], 0), job.session)
    right = mix(fleet.key[decode], job.session)
    return left[:, None] + right[None, :]


def mix(keys: Ints, session: int) -> Ints:
    """31-bit mixture of each key with a hash (multiply and fold, wrapping on purpose)."""
    mixed = (keys.astype(np.uint64) ^ np.uint64(session & 0xFFFFFFFF)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(33)).astype(np.int64)
