"""A cluster under load with kills, stalls and clients that leave, over one KV transport, and the verdict at its end.

    python -m tests.fakes.soak [--requests 2000] [--seed 1] [--transports shm,tcp,nixl,mooncake] [--record transfer_soak]

A long soak may be cut into parts, each with a seed and a cluster of its own: they add up in one record for each transport.

2P + 2D with the scripted model, which decides each token from all KV it reads back: any lost or foreign page changes the
text. Every 200 requests one prefill worker is killed and one decode worker is stopped for three seconds; a tenth of the
clients leaves, half of them before the first token. At the end nothing may be held anywhere.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from benchmarks.record import RESULTS, commit, write_record
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.fakes.audit import findings, gateway_findings, statistics
from tests.fakes.chaos import Outcome, faults, storm, work
from tests.fakes.live_cluster import Cluster, running_cluster, wait_for
from tests.fakes.truth import scripted_text

MODEL = ScriptedConfig(mean_length=200, step_delay_ms=5.0)
BATCH = 100
STALL_S = 3.0
TRIES = 4
"""Batches that may pass without their trouble; they count as requests all the same."""
SETTINGS = (
    "all:engine.page_tokens=16",
    "all:engine.num_pages=2048",
    "all:engine.chunk_tokens=32",
    "all:engine.audit_every_steps=8",
    "all:transfer.digests=true",
    "all:transfer.lease_ttl_s=6",
    "all:transfer.progress_timeout_s=2",
)
COUNTED = (
    "transfer_pulls",
    "transfer_pulls_committed",
    "transfer_pulls_failed",
    "transfer_pulls_cancelled",
    "transfer_bytes_pulled",
    "transfer_digest_failures",
    "transfer_leases_lost",
    "transfer_fences",
    "transfer_releases_invalid",
    "worker_need_prefill_total",
    "worker_recovered_here_total",
)
"""Counts of the workers that live at the end: those of killed ones are gone with them."""


def soak(directory: Path, transport: str, requests: int, seed: int = 1) -> dict[str, object]:
    """Run one soak; returns what happened, with everything that went wrong under ``faults``."""
    model = prepare_scripted(directory, MODEL)
    flags = ["--prefill", "2", "--decode", "2", "--transfer", transport, "--served-name", "soak"]
    for value in SETTINGS:
        flags += ["--set", value]
    with running_cluster(directory, *flags, model=str(model)) as cluster:
        start = time.monotonic()
        outcomes: list[Outcome] = []
        events: list[str] = []
        for number in range(-(-requests // BATCH)):
            trouble = partial([_kill, _stall][number % 2], cluster, number // 2)
            count, tries = min(BATCH, requests - number * BATCH), itertools.count()
            while len(events) <= number:
                again = next(tries)
                assert again < TRIES, "no batch had hand-overs under way when it was looked at"
                items = _work(count, seed * 1000 + again * 100 + number)
                outcomes += _with_trouble(cluster, items, trouble, events, number)
        seconds = time.monotonic() - start
        cluster.wait_ready(5)
        found = [fault for outcome in outcomes for fault in faults(outcome)]
        found += _held(cluster)
        counts = dict.fromkeys(COUNTED, 0.0)
        for stats in statistics(cluster, audit=False).values():
            for name in COUNTED:
                counts[name] += stats.values.get(name, 0.0)
        if counts["transfer_digest_failures"]:
            found.append("a digest differed")
        return {
            "transport": transport,
            "commit": commit(),
            "load_average": round(psutil.getloadavg()[0], 1),
            "seed": seed,
            "requests": len(outcomes),
            "left_early": sum(outcome.cancelled for outcome in outcomes),
            "events": events,
            "seconds": round(seconds, 1),
            "counts_of_living_workers": counts,
            "faults": found,
        }


def _work(count: int, seed: int) -> list[tuple[str, str, int]]:
    return [(p, scripted_text(p, n, MODEL), n) for p, _, n in work(count, seed)]


def _with_trouble(
    cluster: Cluster, items: list[tuple[str, str, int]], trouble: Callable[[], str], events: list[str], seed: int
) -> list[Outcome]:
    failure: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            # A machine that is slow to tell may see the batch end before it sees what is under way.
            wait_for(lambda: over.is_set() or _total(cluster, "transfer_leases") > 4, 200, "no end of the batch")
            if not over.is_set():
                events.append(trouble())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    outcomes = asyncio.run(
        storm(cluster.base_url, "soak", items, concurrency=24, cancel_share=0.05, early_share=0.05, seed=seed)
    )
    over.set()
    thread.join()
    if failure:
        raise failure[0]
    return outcomes


def _kill(cluster: Cluster, number: int) -> str:
    worker = f"prefill-{1 + number % 2}"
    cluster.kill(worker)
    wait_for(lambda: cluster.worker(worker)["state"] == "ready", 60, f"{worker} is not back")
    return f"kill -9 {worker}"


def _stall(cluster: Cluster, number: int) -> str:
    worker = f"decode-{1 + number % 2}"
    pid = cluster.worker(worker)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STALL_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"stop {worker} for {STALL_S:g} s"


def _total(cluster: Cluster, name: str) -> float:
    return sum(stats.values.get(name, 0.0) for stats in statistics(cluster, audit=False).values())


def _held(cluster: Cluster) -> list[str]:
    end = time.monotonic() + 30
    while held := findings(cluster) + gateway_findings(cluster):
        if time.monotonic() > end:
            return held
        time.sleep(0.2)
    return []


def earlier_parts(name: str, seed: int) -> list[dict[str, object]]:
    """Return what the record holds of parts with a smaller seed: the first part begins it anew."""
    path = RESULTS / f"{name}.json"
    parts = json.loads(path.read_text())["result"] if path.exists() else []
    return [part for part in parts if part["seed"] < seed]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--transports", default="shm,tcp,nixl,mooncake")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", default="")
    options = parser.parse_args()
    rows = []
    for transport in options.transports.split(","):
        with tempfile.TemporaryDirectory() as directory:
            rows.append(soak(Path(directory), transport, options.requests, options.seed))
        print(rows[-1], flush=True)
        if options.record:
            note = "2P + 2D, scripted model, digests on, every text compared; an empty list of faults passes"
            name = f"{options.record}_{transport}"
            write_record(name, [*earlier_parts(name, options.seed), rows[-1]], note=note)
    wrong = [fault for row in rows for fault in row["faults"]]
    assert not wrong, wrong[:20]


if __name__ == "__main__":
    main()
