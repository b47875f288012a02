"""2P + 2D, 64 concurrent streams, random cancellations, a kill -9 of each role (issue point 5).

The scripted model computes each token from all KV that it reads back, so any lost or foreign page changes the text,
and the truth is known without any engine.
"""

import asyncio
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine.models.builtin import SCRIPTED, prepare_scripted
from tests.fakes.audit import findings
from tests.fakes.chaos import Outcome, faults, storm, work
from tests.fakes.live_cluster import running_cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STREAMS = 64
REQUESTS = 160


def test_every_accepted_request_gets_one_right_reply_while_workers_die(tmp_path):
    flags = ("--prefill", "2", "--decode", "2", "--served-name", "scripted", "--set", "all:engine.audit_every_steps=1")
    # Slow enough that all streams are open whenever a worker dies, and not only what the machine has time for.
    model = prepare_scripted(tmp_path, msgspec.structs.replace(SCRIPTED, step_delay_ms=10.0))
    with running_cluster(tmp_path, *flags, model=str(model)) as cluster:
        stop = threading.Event()

        def killer():
            for worker in ("decode-1", "prefill-1"):
                if stop.wait(1.5):
                    return
                cluster.kill(worker, signal.SIGKILL)
                wait_for(lambda w=worker: cluster.worker(w)["state"] == "ready", 60, f"{worker} is not back")

        thread = threading.Thread(target=killer)
        thread.start()
        outcomes = []
        rounds = 0
        while thread.is_alive() or rounds < 1:
            items = work(REQUESTS, seed=rounds)
            outcomes += asyncio.run(
                storm(cluster.base_url, "scripted", items, concurrency=STREAMS, cancel_share=0.15, seed=rounds)
            )
            rounds += 1
        stop.set()
        thread.join()
        assert [f for o in outcomes for f in faults(o)] == []
        assert sum(o.cancelled for o in outcomes) > 0
        wait_for(lambda: findings(cluster) == [], 60, f"audit: {findings(cluster)}")
        restarted = [p["id"] for p in cluster.processes() if p["restarts"]]
        assert sorted(restarted) == ["decode-1", "prefill-1"], "both kills must have happened"


@pytest.mark.parametrize(
    "planted",
    [
        Outcome("p", "abc", 3, status=200, text="abX", finishes=["length"], dones=1),
        Outcome("p", "abc", 3, status=200, text="abc", finishes=["length", "length"], dones=1),
        Outcome("p", "abc", 3, status=200, text="ab", finishes=[], dones=0),
        Outcome("p", "abc", 3, status=200, text="abc", finishes=["length"], dones=0),
        Outcome("p", "abc", 3, status=200, text="", cancelled=False, broken="ReadError"),
        Outcome("p", "abc", 3, status=200, text="x", cancelled=True),
        Outcome("p", "abc", 3, status=500, errors=["boom"]),
    ],
)
def test_the_verdict_sees_each_planted_fault(planted):
    assert faults(planted) != []


def test_corrupted_kv_changes_the_text(tmp_path):
    """Negative control with the real system: bytes flipped in P's pool while D pulls must show as wrong text."""
    with running_cluster(tmp_path, "--transfer", "shm", "--set", "all:transfer.digests=false") as cluster:
        stop = threading.Event()
        pid = cluster.worker("prefill-1")["pid"]

        def spoil():
            segments = [p for p in Path("/dev/shm").glob("tandem-kv-*") if f"-{pid}-" in p.name]
            assert segments
            # The other one is the probe page.
            largest = max(segments, key=lambda segment: segment.stat().st_size)
            with largest.open("r+b") as pool:
                size = largest.stat().st_size
                while not stop.is_set():
                    for offset in range(0, min(size, 1 << 20), 512):
                        pool.seek(offset)
                        pool.write(b"\xa5")
                    pool.flush()
                    time.sleep(0.001)

        thread = threading.Thread(target=spoil)
        thread.start()
        items = work(24, seed=99)
        for seed in range(20):  # where the thread seldom runs, the first reads may be faster than it
            outcomes = asyncio.run(storm(cluster.base_url, "scripted", items, concurrency=8, cancel_share=0, seed=seed))
            seen = [f for o in outcomes for f in faults(o)]
            if seen:
                break
        stop.set()
        thread.join()
        assert seen != [], "corrupted KV went unnoticed: the oracle is blind"
