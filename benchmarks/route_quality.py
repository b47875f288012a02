"""Routing quality by simulation over public traces: goals, hit share and load spread, late events, restarts, gateways.

    python -m benchmarks.route_quality --traces DIR --part goals|quality|population|azure|faults

Service time, queue and cache as in `benchmarks.simulator`. Arrivals are sped up until workers are busy: 0.225 times
the recorded rate of `conversation` a worker, 0.2 of `synthetic`. The agentic trace is its first 300 sessions, which
start at random on average `gap_s` apart (the file starts all at once); a turn follows the answer before it. In the
part `population` larger fleets get more users (copies of a trace with blocks of their own) instead of the same ones
faster: every worker has as much to do as of four.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import traces
from benchmarks.record import write_record
from benchmarks.simulator import ORACLE, Scene, Simulation
from gateway.routing.job import RoutingRules

PEERS = ("cache_aware", "weighted_scores", "overlap_cost", "affinity_filter", "exploit_explore", "consistent_hash")
SIMPLE = ("random", "round_robin", "least_loaded")
OURS = "prefix"
BY_OWN_DISPATCHES = ("cache_aware", "consistent_hash")
"""Policies whose originals know no events."""
PART = 4000
"""Requests of a trace where many runs are compared."""
ENDLESS = 1 << 22
SMALL, LARGE = 2000, 4000
"""Blocks of 512 tokens: caches of 1.0 and 2.0 million tokens."""
RATES = {"conversation": 0.225, "synthetic": 0.2}

Row = Mapping[str, object]


def one(trace: traces.Trace, policy: Any, scene: Scene, **about: object) -> Row:
    """Run once and return a row of the record."""
    started = time.process_time()
    rules = RoutingRules(policy=OURS if policy == ORACLE else policy)
    scene = replace(scene, has_events=scene.has_events and policy not in BY_OWN_DISPATCHES)
    outcome = Simulation(trace, scene, rules, oracle=policy == ORACLE).run()
    row = {"trace": trace.name, "policy": policy, "workers": scene.workers, **about, **outcome.summary()}
    row["simulation_cpu_s"] = round(time.process_time() - started, 1)
    print(msgspec.json.encode(row).decode(), flush=True)
    return row


def agentic(directory: Path, gap_s: float, sessions: int = 300) -> traces.Trace:
    """Return the agentic trace with sessions that start so far apart."""
    trace = traces.agentic(directory / traces.LOADERS["agentic"][0], gap_s=gap_s, sessions=sessions)
    return replace(trace, name=f"agentic, {sessions} sessions {gap_s:g} s apart")


def beginning(name: str, directory: Path) -> traces.Trace:
    """Return the first requests of a trace."""
    trace = traces.load(name, directory)
    return replace(trace, name=f"{name}, first {PART}", turns=trace.turns[:PART])


def goals(directory: Path) -> Iterator[Row]:
    """The figures with a goal, beside other policies in the same scene."""
    conversation = traces.load("conversation", directory).faster(1.8)
    small, large = Scene(workers=8, cache_blocks=SMALL), Scene(workers=8, cache_blocks=LARGE)
    yield one(conversation, OURS, small, goal_mean_s=1.40)
    for gap_s in (3.0, 2.0):
        sessions = agentic(directory, gap_s)
        yield one(sessions, OURS, large, cache_blocks=LARGE, goal_mean_s=5.0)
        yield one(sessions, OURS, small, cache_blocks=SMALL, goal_mean_s=25.0)
    yield one(agentic(directory, 1.5), OURS, replace(large, workers=16), cache_blocks=LARGE, goal_mean_s=2.1)
    for policy in (*PEERS, "least_loaded", ORACLE):
        yield one(conversation, policy, small)
    for policy in ("overlap_cost", "cache_aware"):
        yield one(agentic(directory, 3.0), policy, large, cache_blocks=LARGE)
    yield one(agentic(directory, 3.0), "overlap_cost", small, cache_blocks=SMALL)


def quality(directory: Path) -> Iterator[Row]:
    """Hit share and load spread with caches that forget nothing: what is lost is lost by placement."""
    for name, rate in RATES.items():
        for workers in (4, 16, 64):
            trace = beginning(name, directory).faster(rate * workers)
            for policy in (OURS, ORACLE, *SIMPLE, "cache_aware", "weighted_scores", "overlap_cost"):
                yield one(trace, policy, Scene(workers=workers, cache_blocks=ENDLESS))
    for workers in (4, 16, 64):
        trace = agentic(directory, 24.0 / workers, sessions=100)
        for policy in (OURS, ORACLE, "random", "overlap_cost", "cache_aware"):
            yield one(trace, policy, Scene(workers=workers, cache_blocks=ENDLESS))


def population(directory: Path) -> Iterator[Row]:
    """Hit share and load spread where the number of users grows with the fleet."""
    policies = (OURS, ORACLE, "random", "least_loaded", "cache_aware", "overlap_cost")
    for name, rate in RATES.items():
        trace = beginning(name, directory).faster(rate * 4)
        for workers in (4, 16, 64):
            for policy in policies:
                yield one(trace.superposed(workers // 4), policy, Scene(workers=workers, cache_blocks=ENDLESS))
    for workers, copies in ((4, 1), (16, 4), (64, 16)):
        trace = agentic(directory, 6.0, sessions=125).superposed(copies)
        for policy in (OURS, ORACLE, "overlap_cost"):
            yield one(trace, policy, Scene(workers=workers, cache_blocks=ENDLESS))


def azure(directory: Path) -> Iterator[Row]:
    """Load spread only: these traces have no block ids, so nothing is ever cached."""
    for name in ("azure_conv", "azure_code"):
        for workers, factor in ((4, 3.0), (16, 12.0), (64, 48.0)):
            trace = beginning(name, directory).faster(factor)
            for policy in (OURS, "random", "round_robin", "least_loaded"):
                yield one(trace, policy, Scene(workers=workers))


def faults(directory: Path) -> Iterator[Row]:
    """Late events, restarted workers, several gateways, noisy service times, no events at all."""
    trace = beginning("conversation", directory).faster(0.225 * 16)
    base = Scene(workers=16, cache_blocks=SMALL)
    scenes = {
        "events 0 s late": replace(base, lag_s=0.0),
        "events 0.5 s late": replace(base, lag_s=0.5),
        "events 2 s late": replace(base, lag_s=2.0),
        "each worker restarts once": replace(base, restarts=tuple(50.0 + 15.0 * number for number in range(16))),
        "four gateways": replace(base, gateways=4),
        "service times vary by 30 %": replace(base, noise=0.3),
        "no events": replace(base, has_events=False),
    }
    for name, scene in scenes.items():
        yield one(trace, OURS, scene, situation=name)
    sessions = agentic(directory, 1.5, sessions=100)
    for name in ("events 0 s late", "events 2 s late", "each worker restarts once", "four gateways"):
        yield one(sessions, OURS, replace(scenes[name], cache_blocks=LARGE), situation=name)
    for name in ("events 0 s late", "events 2 s late", "four gateways"):
        yield one(trace, "overlap_cost", scenes[name], situation=name)


PARTS = {"goals": goals, "quality": quality, "population": population, "azure": azure, "faults": faults}
NOTE = (
    "Simulated: FIFO prefill, service time 0.02 + u/12000 + 1.2e-9*u*(n-u/2) s, LRU caches of 512-token blocks, the "
    "product's own routing code. Peers' policies are re-implementations of their published formulas with our queue "
    "estimate and (where marked in the code) without events; the figures are no claim about the products."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for row in PARTS[arguments.part](arguments.traces):
        rows.append(row)
        write_record(f"route_{arguments.part}", rows, note=NOTE)


if __name__ == "__main__":
    main()
