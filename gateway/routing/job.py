"""What routing decides about (`Job`), by which constants (`RoutingRules`), and what it answers (`Choice`).

Plain values; knows no workers' names and no wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.fleet import Floats, Ints
from gateway.routing.calibration import LinkCosts

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

NONE = -1
"""Slot of "no prefill worker": the decode worker computes the prompt."""


class RoutingRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `routing` of the gateway's configuration. Times are seconds; figures reported by workers win."""

    policy: Literal[
        "prefix",
        "least_loaded",
        "round_robin",
        "random",
        "least_requests",
        "power_of_two",
        "consistent_hash",
        "cache_aware",
        "overlap_cost",
        "weighted_scores",
        "affinity_filter",
        "exploit_explore",
    ] = "prefix"
    """`prefix` is ours; the others are there to compare with (`gateway.routing.policies`)."""
    base_s: NotNegative = 0.002
    """Fixed cost of one prefill, until measured."""
    prefill_tokens_per_s: Positive = 2000.0
    """Assumed until a worker reports its own rate, or its kind was measured."""
    quadratic_s: NotNegative = 0.0
    """Seconds per (uncached token x context token), attention's share of long prompts, until measured."""
    step_s: Positive = 0.02
    """Assumed decode step until reported."""
    expected_output_tokens: Annotated[int, Meta(ge=1)] = 128
    """A request is assumed to emit at most this many tokens when its slow-down of a decode worker is predicted."""
    duplicate_weight: NotNegative = 2.0
    """Extra charge for recomputing what another worker already holds, on continuing chains."""
    recent_weight: NotNegative = 0.03
    """Times k/(1-k), k = share of continuing requests: charge for long-term load, on new chains."""
    continuing_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """A prompt continues a chain if some worker holds at least this share of it."""
    working_set_share: Annotated[float, Meta(ge=0, le=4)] = 1.1
    """Contexts of live sessions (X-Session-Affinity) may fill this share of the caches; a new session waits. 0: never.

    Above 1 because every context is counted at what it usually grows to, silent ones and shared prefixes included.
    """
    tie_share: NotNegative = 0.02
    tie_s: NotNegative = 0.002
    """Pairs within best * (1 + share) + tie_s count as equal; the longest prefix, then rotation decides."""
    shortlist: Annotated[int, Meta(ge=1)] = 64
    """Pairs are formed of at most this many prefill and this many decode workers, the best of each kind."""
    max_waiting_requests: Annotated[int, Meta(ge=0)] = 1024
    """A decode worker with more live requests than its rows plus this takes no more."""
    local_fallback: bool = True
    """If no prefill worker can be had, let a `remote` decode worker compute the prompt."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to be placed."""

    model: int
    """The directory's number of the model's name."""
    num_tokens: int
    """Tokens whose KV is needed: the prompt, and on a resume the output so far."""
    max_output: int
    matched: Ints
    """[slots] leading tokens that each worker already holds."""
    exclude_prefill: frozenset[int] = frozenset()
    exclude_decode: frozenset[int] = frozenset()
    session: int = 0
    """Hash of the session hint; 0: none. Decides only between equals."""
    head: int = 0
    """Hash of the first two pages."""
    continuing: float = 0.0
    """k of `RoutingRules.recent_weight`, as measured by this gateway."""
    link: LinkCosts = msgspec.field(default_factory=LinkCosts)
    homes: Mapping[int, float] = {}
    """Tokens that live sessions need, by the slot that has them."""
    cache_share: float = 1.0
    """Of a cache that sessions may fill."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision was based on: prefill candidates for the chosen decode worker, and decode candidates."""

    prefill: Ints | list[int]
    """[P] slots; the last one is the chosen decode worker, computing the prompt itself."""
    queue_s: Floats | list[float]
    compute_s: Floats | list[float]
    horizon_s: Floats | list[float]
    move_s: Floats | list[float]
    matched: Ints | list[int]
    """[P] what each would cost and holds."""
    decode: Ints | list[int]
    """[D] slots."""
    slow_s: Floats | list[float]
    held: Ints | list[int]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: slots of the pair, and why."""

    prefill: int
    """A slot, or `NONE`."""
    decode: int
    seconds: float
    """Predicted cost of the pair: for metrics and `why` logs."""
    prefill_s: float
    """Predicted prefill time: what the long-term load is charged."""
    wait_s: float = 0.0
    """Predicted seconds to the first token: queue and prefill."""
    matched_prefill: int = 0
    matched_decode: int = 0
    table: CostTable | None = None
    """None for policies that predict nothing."""


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no pair."""

    role: str
    """decode | prefill | pair | capacity | fits"""
    message: str
    largest: int = 0
    """With role `fits`: the largest prompt + output any worker of this model takes."""

    @classmethod
    def does_not_fit(cls, num_tokens: int, largest: int) -> "Shortage":
        """Return what is said of a sequence that no worker of its model can hold."""
        return cls(
            role="fits",
            largest=largest,
            message=f"the sequence has {num_tokens} tokens; this deployment fits at most {largest - 1} "
            "before the next output token",
        )


NO_PAIR = Shortage(role="prefill", message="no prefill worker that matches a ready decode worker is ready")

Placement = Choice | Shortage


@dataclass(slots=True)
class Continuation:
    """Measures k: the decayed share of requests that continue a chain some worker holds."""

    weight: float = 0.02
    share: float = field(default=0.0)

    def observe(self, continuing: bool) -> None:
        """Count one placed request."""
        self.share += self.weight * (float(continuing) - self.share)
