"""The autoscaler's decision: signals and memory in, targets and reasons out. No clock, no I/O, no randomness.

Tokens of work, not requests: a queue of requests is empty while prefill keeps up and says "one worker" until it is too
late. Grow fast, shrink slowly and one worker a step, never on stale figures, never past the budget; when both pools
want more than there is, decode goes first, because prefilled KV without a decode place is waste.
"""

from math import ceil

import msgspec

from deploy.autoscale.needs import Needs, kv_share, needs_of
from deploy.autoscale.pool_memory import PoolMemory
from deploy.autoscale.signals import PoolCount, Rules, Signals


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything carried from tick to tick; a new controller starts with `fresh`."""

    prefill: PoolMemory
    decode: PoolMemory
    slow_ticks: int = 0
    """Ticks in a row with TPOT over target and room in memory."""

    @classmethod
    def fresh(cls, now: float) -> "Memory":
        """Return the memory of a controller that starts now."""
        return cls(prefill=PoolMemory(since=now), decode=PoolMemory(since=now))


class PoolDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool should become. `target` equals the present size when nothing is to be done."""

    need: float
    target: int
    reason: str
    """grow | shrink | steady | stale | network_bound | settling | window | budget | minimum"""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One tick's outcome, complete enough to be replayed from the log."""

    needs: Needs
    prefill: PoolDecision
    decode: PoolDecision
    over_budget: bool
    """The load needs more than the budget: the gateways should refuse early instead of queueing without bound."""


class _Limits(msgspec.Struct, frozen=True, kw_only=True):
    minimum: int
    maximum: int
    down_window_s: float
    fill: float
    """Share of a worker that one unit of need stands for."""


def decide(rules: Rules, memory: Memory, signals: Signals) -> tuple[Decision, Memory]:
    """Return the decision of this tick and the memory for the next."""
    needs = needs_of(rules, signals)
    if signals.age_s > rules.stale_s:
        return _held(needs, signals, "stale"), memory
    is_slow = signals.tpot_p95_s > rules.tpot_s and kv_share(rules, signals) < rules.kv_fill
    slow_ticks = memory.slow_ticks + 1 if is_slow else 0
    need_decode = needs.decode
    if slow_ticks >= rules.tpot_ticks:
        # Bound by the batch, not by memory: one more worker than now, whatever the KV says.
        need_decode = max(need_decode, signals.decode.want + 1.0)
    decode, decode_memory = _pool(
        rules, _decode_limits(rules), memory.decode, signals.decode, need=need_decode, now=signals.now
    )
    prefill, prefill_memory = _pool(
        rules, _prefill_limits(rules), memory.prefill, signals.prefill, need=needs.prefill, now=signals.now
    )
    if needs.network_bound and prefill.target > signals.prefill.want:
        prefill = PoolDecision(need=prefill.need, target=signals.prefill.want, reason="network_bound")
    decode, prefill, over_budget = _within_budget(rules, signals, decode, prefill)
    if decode.target > signals.decode.want:
        slow_ticks = 0
    memory = Memory(
        prefill=_remember(prefill_memory, signals.prefill, prefill, signals.now),
        decode=_remember(decode_memory, signals.decode, decode, signals.now),
        slow_ticks=slow_ticks,
    )
    return Decision(needs=needs, prefill=prefill, decode=decode, over_budget=over_budget), memory


def _prefill_limits(rules: Rules) -> _Limits:
    return _Limits(
        minimum=rules.prefill_minimum,
        maximum=rules.prefill_maximum,
        down_window_s=rules.prefill_down_window_s,
        fill=rules.prefill_fill,
    )


def _decode_limits(rules: Rules) -> _Limits:
    return _Limits(
        minimum=rules.decode_minimum,
        maximum=rules.decode_maximum,
        down_window_s=rules.decode_down_window_s,
        fill=rules.kv_fill,
    )


def _held(needs: Needs, signals: Signals, reason: str) -> Decision:
    return Decision(
        needs=needs,
        prefill=PoolDecision(need=needs.prefill, target=signals.prefill.want, reason=reason),
        decode=PoolDecision(need=needs.decode, target=signals.decode.want, reason=reason),
        over_budget=False,
    )


def _pool(
    rules: Rules, limits: _Limits, memory: PoolMemory, count: PoolCount, *, need: float, now: float
) -> tuple[PoolDecision, PoolMemory]:
    """Damp one pool's need into a target; budget and link come after."""
    # The dead band only keeps a worker; it never asks for one.
    recommended = ceil(need) if need > count.want else min(count.want, ceil(need + rules.dead_band))
    recommended = min(max(recommended, limits.minimum), limits.maximum)
    memory = memory.with_recommendation(now, recommended, max(limits.down_window_s, rules.up_window_s))
    is_settled = memory.is_settled(count, now, rules.settle_s)
    low, high = memory.lowest(now, rules.up_window_s), memory.highest(now, limits.down_window_s)

    def outcome(target: int, reason: str) -> tuple[PoolDecision, PoolMemory]:
        return PoolDecision(need=need, target=target, reason=reason), memory

    if count.want < limits.minimum:
        return outcome(limits.minimum, "minimum")
    if low > count.want:
        # Starting workers count as capacity, so a pool that still grows may grow further; one that shrinks finishes.
        return outcome(low, "grow") if is_settled or memory.direction > 0 else outcome(count.want, "settling")
    if high < count.want:
        if not is_settled:
            return outcome(count.want, "settling")
        if now - memory.since < limits.down_window_s:
            return outcome(count.want, "window")
        fill_without_one = need / (count.want - 1) if count.want > 1 else float("inf")
        # One unit of need is a worker at its planned fill; the rule speaks of the share of the workers that would remain.
        if fill_without_one * limits.fill > rules.leave_fill:
            return outcome(count.want, "steady")
        return outcome(count.want - 1, "shrink")
    return outcome(count.want, "steady")


def _within_budget(
    rules: Rules, signals: Signals, decode: PoolDecision, prefill: PoolDecision
) -> tuple[PoolDecision, PoolDecision, bool]:
    """Cut growth to what the budget holds: decode first, then prefill. Never shrinks a pool that serves."""
    busy = signals.prefill.draining + signals.decode.draining
    room = rules.budget - busy
    decode_most = max(room - max(rules.prefill_minimum, min(prefill.target, signals.prefill.want)), 0)
    over = False
    if decode.target > signals.decode.want and decode.target > decode_most:
        over = True
        decode = PoolDecision(need=decode.need, target=max(signals.decode.want, decode_most), reason="budget")
    prefill_most = max(room - decode.target, 0)
    if prefill.target > signals.prefill.want and prefill.target > prefill_most:
        over = True
        prefill = PoolDecision(need=prefill.need, target=max(signals.prefill.want, prefill_most), reason="budget")
    at_maximum = decode.need > rules.decode_maximum or prefill.need > rules.prefill_maximum
    return decode, prefill, over or at_maximum


def _remember(memory: PoolMemory, count: PoolCount, decision: PoolDecision, now: float) -> PoolMemory:
    if decision.target == count.want:
        return memory
    return memory.with_change(now, count, decision.target)
