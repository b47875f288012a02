"""What the autoscaler sees at one tick, and what it may spend: plain numbers, summed over all gateways.

Units: tokens, seconds, bytes. Rates of one worker are measured while it is busy.
"""

import msgspec


class PoolCount(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one pool, by what they can do."""

    ready: int
    starting: int = 0
    """Ordered and not ready yet; they count as capacity, or every tick of a start would order more."""
    draining: int = 0

    @property
    def want(self) -> int:
        """Workers that serve or will."""
        return self.ready + self.starting


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """One tick."""

    now: float
    """Monotonic seconds of the controller."""
    age_s: float = 0.0
    """Age of the oldest figures that went into the sums."""
    prefill: PoolCount
    decode: PoolCount
    inflow_uncached_tokens_per_s: float = 0.0
    """Prompt tokens that no prefix cache held, mean of the last 30 s."""
    queued_uncached_tokens: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """Of one busy worker; 0: not measured yet."""
    live_kv_tokens: float = 0.0
    waiting_kv_tokens: float = 0.0
    """KV of requests that wait for room in a decode worker."""
    kv_capacity_tokens: float = 0.0
    """Of one decode worker; 0: unknown."""
    decode_requests: float = 0.0
    """Requests that decode workers run, and those that wait for a row that a running one holds."""
    decode_rows: float = 0.0
    """Of one decode worker; 0: unknown."""
    kv_inflow_tokens_per_s: float = 0.0
    """KV that arriving requests will hold when they end (prompt + answer), mean of the last 30 s."""
    request_life_s: float = 0.0
    """Mean time a request holds its KV; with the inflow it tells the KV that today's arrivals lead to."""
    output_tokens_per_s: float = 0.0
    """That arriving requests ask for (requests/s x mean answer), mean of 30 s: a full pool's own output would hide need."""
    decode_tokens_per_s: float = 0.0
    """Of one busy worker; 0: not measured yet."""
    tpot_p95_s: float = 0.0
    kv_backlog_bytes: float = 0.0
    kv_bytes_per_s: float = 0.0
    """Measured while KV moves; 0: not measured yet."""


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[autoscale]`: targets, budget and damping."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    prefill_tokens_per_s: float = 1000.0
    """First guess, until measured."""
    decode_tokens_per_s: float = 1000.0
    kv_capacity_tokens: float = 100_000.0
    prefill_minimum: int = 1
    prefill_maximum: int = 8
    decode_minimum: int = 1
    decode_maximum: int = 8
    budget: int = 16
    """Most workers of both pools together."""
    prefill_fill: float = 0.8
    """Share of a prefill worker's rate that is planned with."""
    kv_fill: float = 0.8
    decode_fill: float = 0.85
    leave_fill: float = 0.7
    """A worker leaves only if the others stay below this without it."""
    dead_band: float = 0.15
    """Part of a worker that need must fall short by before a pool shrinks."""
    up_window_s: float = 5.0
    """A pool grows to the lowest recommendation of so long: a spike of one tick is no load."""
    prefill_down_window_s: float = 180.0
    """A pool shrinks to the highest recommendation of so long."""
    decode_down_window_s: float = 300.0
    settle_s: float = 600.0
    """A change that has not settled after so long is given up, and no longer holds its pool."""
    stale_s: float = 15.0
    """Figures older than this (three ticks) hold everything."""
    tpot_ticks: int = 3
    """Ticks over the target with room in memory before one decode worker is added."""
    link_share: float = 0.25
    """KV backlog over this share of the TTFT target holds prefill: more of it would only lengthen the queue."""
