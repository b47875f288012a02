"""How many workers each pool needs, term by term: pure arithmetic over one tick's signals."""

import msgspec

from deploy.autoscale.signals import Rules, Signals


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Workers as real numbers; the largest term of a pool decides."""

    prefill: float
    decode_kv: float
    decode_rows: float
    decode_rate: float
    network_bound: bool
    """KV waits for the link, not for a worker."""

    @property
    def decode(self) -> float:
        """Need of the decode pool before the TPOT rule."""
        return max(self.decode_kv, self.decode_rows, self.decode_rate)


def needs_of(rules: Rules, signals: Signals) -> Needs:
    """Serve the inflow and clear the queue within half the TTFT target; hold the KV; keep the output rate.

    prefill = (inflow + queued / (0.5 TTFT)) / (fill x rate of one worker)
    decode  = max((live + waiting KV) / (fill x capacity), inflow of KV x life / (fill x capacity),
                  requests / (fill x rows of one worker),
                  output rate / (fill x rate of one worker))

    The second term is Little's law: what the arrivals of now will hold, known one request's life before it is held.
    """
    prefill_rate = signals.prefill_tokens_per_s or rules.prefill_tokens_per_s
    decode_rate = signals.decode_tokens_per_s or rules.decode_tokens_per_s
    capacity = signals.kv_capacity_tokens or rules.kv_capacity_tokens
    work = signals.inflow_uncached_tokens_per_s + signals.queued_uncached_tokens / (0.5 * rules.ttft_s)
    backlog_s = signals.kv_backlog_bytes / signals.kv_bytes_per_s if signals.kv_bytes_per_s > 0 else 0.0
    held = max(
        signals.live_kv_tokens + signals.waiting_kv_tokens, signals.kv_inflow_tokens_per_s * signals.request_life_s
    )
    return Needs(
        prefill=work / (rules.prefill_fill * prefill_rate),
        decode_kv=held / (rules.kv_fill * capacity),
        decode_rows=signals.decode_requests / (rules.kv_fill * signals.decode_rows) if signals.decode_rows else 0.0,
        decode_rate=signals.output_tokens_per_s / (rules.decode_fill * decode_rate),
        network_bound=backlog_s > rules.link_share * rules.ttft_s,
    )


def kv_share(rules: Rules, signals: Signals) -> float:
    """Share of the ready decode workers' KV that is live; 1 when none is ready."""
    capacity = (signals.kv_capacity_tokens or rules.kv_capacity_tokens) * signals.decode.ready
    return signals.live_kv_tokens / capacity if capacity > 0 else 1.0
