"""A live local cluster under a step of load: the product's controller beside a static pool and a queue-length rule.

The scripted model gives a decode worker a known size (rows x steps a second), so a small load is a real step. Requests
arrive by a seeded clock, whether or not earlier ones were answered. Reads what people read: `tandem status` and /statusz.

    python -m benchmarks.autoscale_live [--short]
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from pathlib import Path

import httpx

from benchmarks.record import write_record
from deploy.local.control import ask
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig

ROWS, STEP_MS, ANSWER = 4, 40.0, 60
WORKER_TOKENS_PER_S = ROWS * 1000.0 / STEP_MS
TTFT_S = 4.0
PHASES = ((40, 0.6), (90, 3.6), (90, 0.6))
"""(seconds, requests per second): one worker carries 1.6 of them."""
MOST = 4
QUEUE_TARGET, QUEUE_WINDOW_S = 2, 20.0
FLAGS = {
    "autoscale.ttft_s": TTFT_S,
    "autoscale.prefill_maximum": 1,
    "autoscale.decode_maximum": MOST,
    "autoscale.decode_tokens_per_s": WORKER_TOKENS_PER_S,
    "autoscale.up_window_s": 3.0,
    "autoscale.decode_down_window_s": QUEUE_WINDOW_S,
    "controller.interval_s": 1.0,
}


@dataclass
class Seen:
    """What one run showed."""

    firsts: list[float] = field(default_factory=list)
    """Seconds to the first token, infinite for a request that failed."""
    pool: list[tuple[float, int, int]] = field(default_factory=list)
    """(second, decode workers wanted, decode processes alive)."""


@contextlib.asynccontextmanager
async def cluster(directory: Path, *flags: str) -> AsyncGenerator[Path]:
    """Run `tandem up` in a directory of its own; yields the run directory once it serves."""
    run_dir = directory / "run"
    model = prepare_scripted(directory, ScriptedConfig(mean_length=100_000, step_delay_ms=STEP_MS))
    words = ["up", "--run-dir", str(run_dir), "--port", "0", "--model", str(model), "--served-name", "m"]
    words += ["--set", f"all:engine.num_rows={ROWS}", "--drain-s", "30", *flags]
    log = (directory / "up.log").open("w+")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "deploy.cli", *words, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(300):
            while "serving" not in (directory / "up.log").read_text():
                assert process.returncode is None, (directory / "up.log").read_text()
                await asyncio.sleep(0.2)
        yield run_dir
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def status(run_dir: Path) -> dict[str, object]:
    return await asyncio.to_thread(ask, run_dir, {"command": "status"}, lambda _: None, 30.0)


async def one_request(client: httpx.AsyncClient, number: int, seen: Seen) -> None:
    body = {"model": "m", "prompt": f"request {number}", "max_tokens": ANSWER, "temperature": 0, "stream": True}
    begun, first = time.monotonic(), float("inf")
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and first == float("inf") and response.status_code == httpx.codes.OK:
                    first = time.monotonic() - begun
    except httpx.HTTPError:
        first = float("inf")
    seen.firsts.append(first)


async def load(address: str, seen: Seen, phases: tuple[tuple[int, float], ...]) -> None:
    rng = random.Random(1)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=300) as client, asyncio.TaskGroup() as group:
        end, number = time.monotonic(), 0
        for seconds, rate in phases:
            end += seconds
            while time.monotonic() < end:
                group.create_task(one_request(client, number, seen))
                number += 1
                await asyncio.sleep(rng.expovariate(rate))


async def watch(run_dir: Path, seen: Seen, rule: Callable[[float, int], int] | None) -> None:
    """Note the pool every second; with a rule, scale to what it says of the requests that wait."""
    begun = time.monotonic()
    scaling: asyncio.Task[object] | None = None
    while True:
        told = await status(run_dir)
        decode = [p for p in told["processes"] if p["role"] == "decode"]
        now = time.monotonic() - begun
        seen.pool.append((now, told["want"]["decode"], len(decode)))
        gateway = next(p for p in told["processes"] if p["role"] == "gateway")
        if rule is not None and (scaling is None or scaling.done()):
            async with httpx.AsyncClient(timeout=10) as client:
                view = (await client.get(f"http://{gateway['listener_address']}/statusz")).json()
            waiting = view["queued"] + sum(w["waiting"] for w in view["workers"] if w["role"] == "decode")
            want = rule(now, waiting)
            if want != told["want"]["decode"]:
                body = {"command": "scale", "pools": {"decode": want}}
                scaling = asyncio.create_task(asyncio.to_thread(ask, run_dir, body, lambda _: None, 120.0))
        await asyncio.sleep(1.0)


def queue_rule() -> Callable[[float, int], int]:
    """Requests that wait per replica, as common recipes have it, with a window for shrinking."""
    wishes: list[tuple[float, int]] = []

    def rule(now: float, waiting: int) -> int:
        wishes.append((now, min(MOST, max(1, ceil(waiting / QUEUE_TARGET)))))
        return max(wish for at, wish in wishes if at > now - QUEUE_WINDOW_S)

    return rule


async def run(policy: str, phases: tuple[tuple[int, float], ...]) -> dict[str, object]:
    flags = ["--decode", "2"] if policy == "static_2" else []
    if policy == "tokens":
        flags = ["--autoscale", *(w for k, v in FLAGS.items() for w in ("--set", f"controller:{k}={v}"))]
    seen = Seen()
    with tempfile.TemporaryDirectory() as directory:
        async with cluster(Path(directory), *flags) as run_dir:
            rule = queue_rule() if policy.startswith("queue") else None
            watcher = asyncio.create_task(watch(run_dir, seen, rule))
            await load(str((await status(run_dir))["http_address"]), seen, phases)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    return summary(seen)


def summary(seen: Seen) -> dict[str, object]:
    """Return the figures of one run; a reversal is a change of direction within the run."""
    wants = [want for _, want, _ in seen.pool]
    changes = [after - before for before, after in pairwise(wants) if after != before]
    worker_s = sum((b[0] - a[0]) * a[2] for a, b in pairwise(seen.pool))
    firsts = sorted(seen.firsts)
    return {
        "requests": len(firsts),
        "failed": sum(first == float("inf") for first in firsts),
        "in_slo": round(sum(first <= TTFT_S for first in firsts) / len(firsts), 3),
        "ttft_p50_s": round(firsts[len(firsts) // 2], 2),
        "ttft_p95_s": round(firsts[int(len(firsts) * 0.95)], 2),
        "decode_worker_seconds": round(worker_s),
        "changes": len(changes),
        "reversals": sum(a * b < 0 for a, b in pairwise(changes)),
        "most_workers": max(wants),
        "pool": [(round(at), want, alive) for at, want, alive in seen.pool[::5]],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tenth of the time, no record: does it run?")
    short = parser.parse_args().short
    phases = tuple((max(4, seconds // 10), rate) for seconds, rate in PHASES) if short else PHASES
    result = {}
    for policy in ("static_2", "queue_length", "tokens"):
        result[policy] = asyncio.run(run(policy, phases))
        print(policy, json.dumps({k: v for k, v in result[policy].items() if k != "pool"}), flush=True)
    if not short:
        load = {"phases_s_and_rate": PHASES, "worker_requests_per_s": WORKER_TOKENS_PER_S / ANSWER, "ttft_s": TTFT_S}
        write_record("autoscale_live", {"load": load, "policies": result}, note="shared machine, other work running")


if __name__ == "__main__":
    main()
