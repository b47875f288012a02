"""An hour of a prefill/decode cluster as a fluid, to compare the product's autoscaler with other controllers.

Units: prefill queue in tokens, decode load in live KV tokens, one tick a second, a decision every ten. Workers take
`START_S` to come up and are drained, not cut. A toy: it orders policies, it predicts nothing about real workers.

    python -m benchmarks.autoscale_fluid
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, sin

from benchmarks.record import write_record
from deploy.autoscale.decide import Memory, decide
from deploy.autoscale.signals import PoolCount, Rules, Signals

SECONDS, START_S, DRAIN_S, DECIDE_S = 3600, 90, 30, 10
TTFT_S, TPOT_S = 2.0, 0.05
PREFILL_RATE, KV_CAPACITY, DECODE_RATE = 20_000.0, 600_000.0, 6_000.0
LEAST_STEP_S = 0.02
SEEDS = range(5)


def load_at(second: int) -> tuple[float, int, int]:
    """Requests per second, prompt length, output length: a day in an hour, two bursts and one change of shape."""
    rate = 6 + 3 * sin(second / 600)
    if 900 <= second < 1020:
        rate *= 3
    if 2100 <= second < 2400:
        rate *= 2
    return (rate, 3000, 300) if second < 1800 else (rate, 1000, 900)


@dataclass
class Pool:
    """Workers that serve, start (second at which they are up) and drain (second at which they are gone)."""

    up: int
    starting: list[int] = field(default_factory=list)
    draining: list[int] = field(default_factory=list)

    def tick(self, second: int) -> None:
        self.up += sum(1 for at in self.starting if at <= second)
        self.starting = [at for at in self.starting if at > second]
        self.draining = [at for at in self.draining if at > second]

    @property
    def want(self) -> int:
        return self.up + len(self.starting)

    @property
    def cost(self) -> int:
        return self.want + len(self.draining)

    def count(self) -> PoolCount:
        return PoolCount(ready=self.up, starting=len(self.starting), draining=len(self.draining))

    def scale(self, target: int, second: int) -> None:
        while self.want < target:
            self.starting.append(second + START_S)
        while self.want > max(target, 1):
            if self.starting:
                self.starting.pop()
            else:
                self.up -= 1
                self.draining.append(second + DRAIN_S)


@dataclass
class World:
    """State of the fluid at one second."""

    prefill: Pool
    decode: Pool
    queued: float = 0.0
    live: float = 0.0
    waiting: float = 0.0
    tpot_s: float = LEAST_STEP_S
    life_s: float = 0.0
    inflow: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    kv_inflow: list[float] = field(default_factory=list)

    def step(self, second: int, arrivals: int) -> float:
        """Move one second on and return the predicted time to first token."""
        _, prompt, answer = load_at(second)
        self.queued += arrivals * prompt
        done = min(self.queued, self.prefill.up * PREFILL_RATE)
        self.queued -= done
        self.waiting += done * (1 + answer / prompt / 2)
        admitted = min(max(0.0, self.decode.up * KV_CAPACITY * 0.95 - self.live), self.waiting)
        self.waiting -= admitted
        self.live += admitted
        requests = max(1.0, self.live / (prompt + answer / 2))
        hold_s = answer / max(1e-9, min(1 / LEAST_STEP_S, self.decode.up * DECODE_RATE / requests))
        self.live -= self.live / max(hold_s, 1.0)
        self.tpot_s = hold_s / answer
        self.inflow = [*self.inflow[-29:], arrivals * prompt]
        self.output = [*self.output[-29:], arrivals * answer]
        self.kv_inflow = [*self.kv_inflow[-29:], arrivals * (prompt + answer)]
        self.life_s = min(hold_s, answer * TPOT_S)
        blocked_s = self.waiting / max(1.0, self.decode.up * KV_CAPACITY) * hold_s
        return self.queued / max(1.0, self.prefill.up * PREFILL_RATE) + blocked_s + prompt / PREFILL_RATE


Controller = Callable[[World, int], tuple[int, int]]


def static(world: World, _second: int) -> tuple[int, int]:
    return world.prefill.want, world.decode.want


def queue_length(window_s: int) -> Callable[[int], Controller]:
    """Requests queued per replica (4) and KV share (0.7), as an HPA would see them; optional down window."""

    def make(budget: int) -> Controller:
        seen: list[tuple[int, int, int]] = []

        def control(world: World, second: int) -> tuple[int, int]:
            prompt = load_at(second)[1]
            seen.append((second, max(1, ceil(world.queued / prompt / 4)), max(1, ceil(world.live / KV_CAPACITY / 0.7))))
            recent = [entry for entry in seen if entry[0] > second - max(window_s, 1)]
            prefill = max(entry[1] for entry in recent)
            decode = max(entry[2] for entry in recent)
            prefill = min(budget - world.decode.want, prefill)
            return prefill, min(budget - max(prefill, 1), decode)

        return control

    return make


def product(budget: int) -> Controller:
    """The product's own decision function."""
    rules = Rules(
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        prefill_tokens_per_s=PREFILL_RATE,
        decode_tokens_per_s=DECODE_RATE,
        kv_capacity_tokens=KV_CAPACITY,
        prefill_maximum=budget - 1,
        decode_maximum=budget - 1,
        budget=budget,
        up_window_s=float(DECIDE_S) / 2,
    )
    memory = Memory.fresh(-1000.0)

    def control(world: World, second: int) -> tuple[int, int]:
        nonlocal memory
        signals = Signals(
            now=float(second),
            prefill=world.prefill.count(),
            decode=world.decode.count(),
            inflow_uncached_tokens_per_s=sum(world.inflow) / max(1, len(world.inflow)),
            queued_uncached_tokens=world.queued,
            live_kv_tokens=world.live,
            waiting_kv_tokens=world.waiting,
            kv_inflow_tokens_per_s=sum(world.kv_inflow) / max(1, len(world.kv_inflow)),
            request_life_s=world.life_s,
            output_tokens_per_s=sum(world.output) / max(1, len(world.output)),
            tpot_p95_s=world.tpot_s,
        )
        decision, memory = decide(rules, memory, signals)
        return decision.prefill.target, decision.decode.target

    return control


CONTROLLERS: dict[str, Callable[[int], Controller]] = {
    "static 2P3D": lambda _budget: static,
    "queue length": queue_length(0),
    "queue length, 300 s window": queue_length(300),
    "tandem": product,
}


def run(make: Callable[[int], Controller], *, seed: int, budget: int) -> dict[str, float]:
    """Simulate one hour and return share in SLO, worker-hours, changes and reversals of the prefill pool."""
    rng = random.Random(seed)
    world, control = World(Pool(2), Pool(3)), make(budget)
    good = total = cost = changes = 0
    moves: list[int] = []
    for second in range(SECONDS):
        world.prefill.tick(second)
        world.decode.tick(second)
        arrivals = sum(rng.random() < load_at(second)[0] / 50 for _ in range(50))
        ttft_s = world.step(second, arrivals)
        total += arrivals
        good += arrivals * (ttft_s <= TTFT_S and world.tpot_s <= TPOT_S)
        cost += world.prefill.cost + world.decode.cost
        if second % DECIDE_S:
            continue
        before = world.prefill.want, world.decode.want
        prefill, decode = control(world, second)
        world.prefill.scale(prefill, second)
        world.decode.scale(decode, second)
        moved = (world.prefill.want > before[0]) - (world.prefill.want < before[0])
        moves += [moved] if moved else []
        changes += (world.prefill.want != before[0]) + (world.decode.want != before[1])
    reversals = sum(a != b for a, b in pairwise(moves))
    return {
        "in_slo": good / total,
        "worker_hours": cost / 3600,
        "changes": float(changes),
        "reversals": float(reversals),
    }


def compare() -> dict[str, dict[str, dict[str, float]]]:
    """Return budget -> controller -> mean of the seeds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for budget in (16, 6):
        rows = found.setdefault(f"budget {budget}", {})
        for name, make in CONTROLLERS.items():
            runs = [run(make, seed=seed, budget=budget) for seed in SEEDS]
            rows[name] = {key: round(sum(r[key] for r in runs) / len(runs), 3) for key in runs[0]}
    return found


def main() -> None:
    result = compare()
    print(json.dumps(result, indent=1))
    write_record("autoscale_fluid", result, note="fluid model, mean of 5 seeds; orders policies, predicts no worker")


if __name__ == "__main__":
    main()
