"""What a placement costs, in predicted seconds: one currency for queueing, computing, moving and slowing down.

Pure functions over the fleet's arrays; each returns one figure per slot or pair.
"""

import numpy as np

from gateway.fleet import Fleet, Floats, Ints
from gateway.routing.job import Job, RoutingRules


def token_seconds(fleet: Fleet, slots: Ints, rules: RoutingRules) -> Floats:
    """[n] seconds per uncached token: measured, else reported, else assumed."""
    reported = fleet.rate[slots]
    assumed = 1.0 / np.where(reported > 0, reported, rules.prefill_tokens_per_s)
    return np.where(fleet.token_s[slots] > 0, fleet.token_s[slots], assumed)


def queue_seconds(fleet: Fleet, slots: Ints, rules: RoutingRules, now: float) -> Floats:
    """[n] seconds until a new prompt would start to be computed: behind ours, and behind other gateways'."""
    return fleet.own_queue_s(now)[slots] + fleet.foreign_tokens[slots] * token_seconds(fleet, slots, rules)


def compute_seconds(fleet: Fleet, slots: Ints, job: Job, matched: Ints, rules: RoutingRules) -> Floats:
    """[n] seconds to compute what is not cached, and what is replayed: linear in tokens plus attention's quadratic share."""
    saved = np.maximum(matched - fleet.replay_tokens[slots], 0)
    uncached = np.maximum(job.num_tokens - saved, 1).astype(np.float64)
    measured = fleet.token_s[slots] > 0
    base = np.where(measured, fleet.base_s[slots], rules.base_s)
    square = np.where(measured, fleet.square_s[slots], rules.quadratic_s)
    attention = square * uncached * (job.num_tokens - uncached / 2)
    return base + uncached * token_seconds(fleet, slots, rules) + attention


def horizon_seconds(fleet: Fleet, slots: Ints, job: Job, compute: Floats, rules: RoutingRules) -> Floats:
    """[n] what the placement costs others later.

    A continuing chain pays for duplicate work; a new one, whose next turns will follow it, for long-term load.
    """
    longest = int(job.matched.max(initial=0))
    if longest >= rules.continuing_share * job.num_tokens:
        return rules.duplicate_weight * compute
    share = min(job.continuing, 0.99)
    recent = rules.recent_weight * share / (1 - share) * fleet.recent_s[slots]
    if not job.homes:
        return recent
    # A session that no longer fits beside those that live there costs somebody its context.
    live = np.zeros(fleet.capacity)
    for slot, tokens in job.homes.items():
        if slot >= 0:  # else its first turn has not been placed yet
            live[slot] = tokens
    room = job.cache_share * fleet.num_pages[slots] * fleet.page_tokens[slots] - live[slots]
    return recent + np.maximum(job.num_tokens - room, 0) * token_seconds(fleet, slots, rules)


def decode_seconds(fleet: Fleet, slots: Ints, job: Job, matched: Ints, rules: RoutingRules) -> Floats:
    """[n] predicted time of decoding there beyond an empty worker: fuller steps, a wait for a row, missing pages."""
    output = float(min(job.max_output, rules.expected_output_tokens))
    step = np.where(fleet.step_s[slots] > 0, fleet.step_s[slots], rules.step_s)
    live, rows = fleet.live_requests()[slots], np.maximum(fleet.rows[slots], 1)
    whole = output * step
    slower = whole * np.minimum(live + 1, rows) / rows
    row_wait = whole * np.maximum(live + 1 - rows, 0) / rows
    size = np.maximum(fleet.page_tokens[slots], 1)
    pages = np.ceil((job.num_tokens + output - matched) / size)
    short = np.maximum(pages - fleet.pages_free[slots], 0) / np.maximum(pages, 1)
    return slower + row_wait + whole * short


def move_seconds(fleet: Fleet, prefill: Ints, decode: Ints, job: Job) -> Floats:
    """[P, D] seconds to move the pages that the decode worker does not hold."""
    missing = np.maximum(job.num_tokens - job.matched[decode], 0)
    far = fleet.domain[prefill][:, None] != fleet.domain[decode][None, :]
    return missing[None, :] * job.link.bytes_per_token * np.where(far, job.link.far_s, job.link.near_s)
