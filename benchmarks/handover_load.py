"""Open-loop load on a cluster, and what its requests saw: the same arrivals for every cluster that is compared.

Requests come at seeded exponential distances whether or not earlier ones were answered. Times are seconds.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.handover_cluster import Answer, Cluster, ask, body_of

VOCAB = (1000, 120_000)
"""Prompts are of tokens in this range: none is a special one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one size."""

    name: str
    prompt: int
    output: int
    per_s: float
    first_s: float
    """A request is good only if its first token comes so soon,"""
    gap_s: float
    """and 99 of 100 of its gaps are no longer than this."""


SHORT = Kind("short", 512, 128, 20.0, 0.5, 0.05)
LONG = Kind("long", 8192, 64, 1.4, 2.0, 0.05)
MIXES: dict[str, tuple[Kind, ...]] = {
    "mixed": (Kind("short", 512, 128, 8.0, 0.5, 0.05), Kind("long", 8192, 64, 0.8, 2.0, 0.05)),
    "short": (SHORT,),
    "long": (LONG,),
}
SHARES = {"mixed": 1.1, "short": 0.7, "long": 1.2}
"""Of the seconds that are asked for: rare requests need more."""
FACTORS = (1.0, 2.0, 3.0)
"""Of the rates above, up to where one prefill worker or two that do both are full."""


def scaled(mix: Sequence[Kind], factor: float) -> tuple[Kind, ...]:
    """Return the mix with so many times its arrivals."""
    return tuple(replace(kind, per_s=kind.per_s * factor) for kind in mix)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Return a prompt that no other one begins like."""
    return [rng.randrange(*VOCAB) for _ in range(length)]


def arrivals(mix: Sequence[Kind], seconds: float, seed: int) -> list[tuple[float, Kind, list[int]]]:
    """Return (time, kind, prompt), in order of time."""
    rng, found = random.Random(seed), list[tuple[float, Kind, list[int]]]()
    for kind in mix:
        at = rng.expovariate(kind.per_s)
        while at < seconds:
            found.append((at, kind, prompt_of(rng, kind.prompt)))
            at += rng.expovariate(kind.per_s)
    return sorted(found, key=lambda arrival: arrival[0])


async def run(cluster: Cluster, mix: Sequence[Kind], seconds: float, seed: int) -> dict[str, object]:
    """Send a mix to a cluster for so long, wait for all answers, and say what they saw, by kind."""
    planned = arrivals(mix, seconds, seed)
    start, answered = time.perf_counter(), list[tuple[Kind, Answer]]()

    async def one(at: float, kind: Kind, prompt: list[int]) -> None:
        body = body_of(cluster.model, prompt, kind.output)
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        answered.append((kind, await ask(cluster.address, body)))

    await asyncio.gather(*(one(*arrival) for arrival in planned))
    whole = time.perf_counter() - start
    rows = {kind.name: _row(kind, [answer for k, answer in answered if k == kind], seconds) for kind in mix}
    return {"seconds": seconds, "until_the_last_answer_s": round(whole, 2), "kinds": rows}


def is_good(kind: Kind, answer: Answer) -> bool:
    """True if a request was answered in full and within its limits."""
    if answer.error or len(answer.tokens) != kind.output:
        return False
    return answer.times[0] <= kind.first_s and _quantile(answer.gaps, 0.99) <= kind.gap_s


def _row(kind: Kind, answers: Sequence[Answer], seconds: float) -> dict[str, object]:
    whole = [answer for answer in answers if not answer.error]
    gaps = [gap for answer in whole for gap in answer.gaps]
    firsts = [answer.times[0] for answer in whole if answer.times]
    return {
        "prompt_tokens": kind.prompt,
        "output_tokens": kind.output,
        "arrivals_per_s": kind.per_s,
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "errors": sorted({answer.error for answer in answers if answer.error})[:3],
        "first_token_ms": spread(firsts),
        "gap_ms": spread(gaps),
        "limits_ms": {"first_token": kind.first_s * 1e3, "p99_gap_of_a_request": kind.gap_s * 1e3},
        "good_per_s": round(sum(is_good(kind, answer) for answer in answers) / seconds, 3),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return quantiles in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    return {
        "p50": round(1e3 * statistics.median(seconds), 2),
        "p90": round(1e3 * _quantile(seconds, 0.9), 2),
        "p99": round(1e3 * _quantile(seconds, 0.99), 2),
        "max": round(1e3 * max(seconds), 2),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
