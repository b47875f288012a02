"""The whole gateway beside routers written in Rust that forward bytes: work per CPU-second and latency, in one run.

Every router has one worker that steps every 10 ms (100 ms above 256 streams) and says the same English: the peers an HTTP worker
(`peers_http_worker`), ours a gRPC worker (`peers_grpc_worker`) whose tokens it turns into text with DeepSeek's format
and full parsing. Same client (`peers_client`); `direct` is the HTTP worker without a router. Only the router's own
processes' CPU time counts; rounds are interleaved. Peers come from environments of their own:
`DIR/sglang-router` (`pip install sglang-router==0.3.2`), `DIR/vllm-router` (`==0.1.17`), `DIR/smg` (`==1.13.0`).
Run: `python -m benchmarks.gateway_peers --environments DIR [--record] [--runs N] [--seconds S]`.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers_client import Streams, closed_loop
from benchmarks.peers_grpc_worker import TEXT_OF
from benchmarks.record import write_record
from tests.fakes.deepseek import write_trained
from tests.fakes.sim_cluster import Child, SimCluster

START_S = 120.0
STREAMS = (1, 64, 256, 1000)
UNARY = (1, 32)
P99_SAMPLES = 1000
"""Fewer give no 99th percentile, but a maximum."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers on a port."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of the router so far, all its processes."""
        # The system's clock of another process's CPU time, see clock_getcpuclockid(3): nanoseconds, not ticks of 10 ms.
        return sum(time.clock_gettime((~process.pid << 3) | 2) for process in self._all())

    def rss_mb(self) -> float:
        """Resident memory."""
        return sum(process.memory_info().rss for process in self._all()) / 1e6

    def _all(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def peer_commands(environments: Path, port: int, worker: str) -> dict[str, list[str]]:
    """Return how each peer is started; round robin is the cheapest of their deterministic policies."""
    shared = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker, "--policy", "round_robin"]
    shared += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    shared += ["--worker-startup-check-interval", "1"]
    python = str(environments / "sglang-router/bin/python")
    return {
        "sglang-router 0.3.2": [python, "-m", "sglang_router.launch_router", *shared, "--log-level", "warn"],
        "vllm-router 0.1.17": [str(environments / "vllm-router/bin/vllm-router"), *shared, "--log-level", "warning"],
        "smg 1.13.0": [
            *(str(environments / "smg/bin/smg"), "launch", *shared, "--log-level", "warn"),
            "--disable-tokenizer-autoload",
        ],
    }


def wait_until_serving(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask until an answer is whole; RuntimeError with the log if none is."""
    end = time.monotonic() + START_S
    while True:
        try:
            if closed_loop(port, 1, 0.5, stream=False)[1]:
                return
        except (OSError, RuntimeError):
            time.sleep(0.5)
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args} does not serve: {log.read_text()[-3000:]}")


def start(command: list[str], log: Path, stack: ExitStack, *, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    """Start a process that ends with the stack."""
    process = subprocess.Popen(command, stderr=log.open("wb"), stdin=stdin, stdout=stdout)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()

    stack.callback(end)
    return process


def start_peers(environments: Path, work: Path, stack: ExitStack) -> dict[str, Target]:
    """Start the HTTP worker and every peer before it."""
    command = [sys.executable, "-m", "benchmarks.peers_http_worker"]
    worker = start(command, work / "worker.log", stack, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker_port = int(worker.stdout.readline())

    wait_until_serving(worker_port, worker, work / "worker.log")
    targets = {"direct": Target(worker_port, psutil.Process(worker.pid))}
    for name in peer_commands(environments, 0, ""):
        port, log = free_port(), work / f"{name}.log"
        command = peer_commands(environments, port, f"http://127.0.0.1:{worker_port}")[name]
        process = start(command, log, stack, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until_serving(port, process, log)
        targets[name] = Target(port, psutil.Process(process.pid))
    return targets


async def start_ours(cluster: SimCluster) -> Target:
    """Start a gateway and its workers; the settings that differ from the defaults are for slow machines and logs."""
    directory = cluster.directory / "deepseek"
    directory.mkdir()
    cluster.model = write_trained(directory)
    gateway = await cluster.start_gateway(access__log="false", membership__ttl_s=60)
    for name, role in (("p1", "prefill"), ("d1", "decode")):
        settings = {
            "worker.id": name,
            "worker.run_dir": cluster.run_dir,
            "worker.secret_file": cluster.secret,
            "worker.gateways": json.dumps([gateway.facts["membership_address"]]),
            "role": role,
            "num_rows": 1024,
            "num_pages": 1 << 30,
            "max_tokens_total": 1 << 30,
            "vocab_size": 1024,
            TEXT_OF: directory,
        }
        child = Child(name, "benchmarks.peers_grpc_worker", settings, cluster.directory, cluster.run_dir)
        cluster.children[name] = child
        await child.start()
        await child.ready()
    await cluster.routable("p1", "d1")

    port = int(gateway.facts["http_address"].rsplit(":", 1)[1])
    return Target(port, psutil.Process(gateway.facts["pid"]))


def measure_streams(target: Target, count: int, seconds: float) -> dict[str, Any]:
    """Open streams together, let all begin, count tokens and CPU for a while."""
    streams = Streams(target.port, count)
    try:
        streams.all_begun(START_S)
        streams.read_for(0.5)
        tokens, events, cpu, wall = streams.num_tokens, streams.num_events, target.cpu_s(), time.monotonic()
        streams.read_for(seconds)
        cpu, wall = target.cpu_s() - cpu, time.monotonic() - wall
        tokens, events = streams.num_tokens - tokens, streams.num_events - events
    finally:
        streams.close()
    return {
        "tokens_per_cpu_s": tokens / cpu,
        "tokens_per_s": tokens / wall,
        "cpu_share": cpu / wall,
        "events_per_token": events / tokens,
        "first_s": list(streams.first_s.values()),
    }


def measure_asking(target: Target, count: int, seconds: float, *, stream: bool) -> dict[str, Any]:
    """Ask for one token in a closed loop."""
    cpu = target.cpu_s()
    first_s, whole_s = closed_loop(target.port, count, seconds, stream=stream)
    if not whole_s:
        raise RuntimeError(f"no answer within {seconds} s")
    return {"requests_per_cpu_s": len(whole_s) / (target.cpu_s() - cpu), "first_s": first_s}


def merge(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians and ranges of the runs' rates; latencies of all runs together."""
    merged: dict[str, float] = {"runs": len(rows)}
    if not rows:
        return merged
    for name in rows[0].keys() - {"first_s"}:
        values = [row[name] for row in rows]
        merged |= {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    first_ms = sorted(1000 * value for row in rows for value in row["first_s"])
    tail = {"p99_ms": first_ms[int(0.99 * len(first_ms))]} if len(first_ms) >= P99_SAMPLES else {}
    middle = first_ms[len(first_ms) // 2]
    return merged | {"first_p50_ms": middle, "first_max_ms": first_ms[-1], "samples": len(first_ms)} | tail


def measure_all(targets: dict[str, Target], runs: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Measure every case of every target in interleaved rounds."""
    cases: dict[str, Callable[[Target], dict[str, Any]]] = {}
    for count in STREAMS:
        cases[f"{count} streams"] = lambda target, count=count: measure_streams(target, count, seconds)
    for count in UNARY:
        key = f"unary, {count} at a time"
        cases[key] = lambda target, count=count: measure_asking(target, count, seconds, stream=False)
    cases["first token of a stream, 1 at a time"] = lambda target: measure_asking(target, 1, seconds, stream=True)
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {case: {} for case in cases}
    failed: dict[str, dict[str, Any]] = {case: {} for case in cases}
    for _ in range(runs):
        for case, measure in cases.items():
            for name, target in targets.items():
                begun = time.monotonic()
                try:
                    rows[case].setdefault(name, []).append(measure(target))
                except (OSError, RuntimeError) as error:
                    failed[case][name] = {"failed": str(error)[:300]}
                print(f"{case}, {name}: {time.monotonic() - begun:.1f} s", failed[case].get(name, ""), flush=True)
    merged = {
        case: {name: merge(found) | failed[case].get(name, {}) for name, found in rows[case].items()} for case in rows
    }
    return merged | {"memory after all": {name: {"rss_mb": target.rss_mb()} for name, target in targets.items()}}


def main() -> None:
    """Measure, print, and with `--record` keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as work, asyncio.Runner() as runner, ExitStack() as stack:
        cluster = SimCluster(Path(work))
        stack.callback(lambda: runner.run(cluster.close()))
        targets = start_peers(options.environments.absolute(), Path(work), stack)
        targets["tandem"] = runner.run(start_ours(cluster))
        result = measure_all(targets, options.runs, options.seconds)
    loads.append(os.getloadavg()[0])
    for case, row in result.items():
        print(case)
        for name, figures in row.items():
            told = (f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in sorted(figures.items()))
            print(f"  {name:20s}", "  ".join(told))
    if options.record:
        note = (
            "peers forward bytes of an HTTP worker by round robin, ours parses tokens of a gRPC worker and routes by prefix; "
            f"one worker each; load average {loads[0]:.1f} before and {loads[1]:.1f} after on {os.cpu_count()} cores: "
            "read latencies beside each other only"
        )
        print(write_record("gateway_peers", result, note=note).name)


if __name__ == "__main__":
    main()
