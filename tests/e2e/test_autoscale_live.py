"""A live cluster with a controller and a load step: the pool grows, shrinks again by draining, and no request fails.

The controller that let it grow is killed (-9): another one follows.
"""

import asyncio
import json
import threading

import pytest

from deploy.controller.journal import replay
from tests.fakes.chaos import faults, storm, work
from tests.fakes.live_cluster import running_cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RULES = {
    # The scripted model computes in no time; told that one worker does 60 tokens a second, a small load is a step.
    "autoscale.decode_tokens_per_s": 60,
    "autoscale.decode_maximum": 3,
    "autoscale.up_window_s": 1.0,
    "autoscale.decode_down_window_s": 3.0,
    "autoscale.prefill_down_window_s": 3.0,
    "controller.interval_s": 0.5,
}


def test_a_load_step_grows_the_decode_pool_and_its_end_drains_it_again(tmp_path):
    settings = [word for key, value in RULES.items() for word in ("--set", f"controller:{key}={value}")]
    with running_cluster(tmp_path, "--autoscale", *settings) as cluster:
        done = threading.Event()
        outcomes = []

        def load():
            seed = 0
            while not done.is_set():
                items = work(32, seed)
                outcomes.extend(
                    asyncio.run(storm(cluster.base_url, "scripted", items, concurrency=8, cancel_share=0, seed=seed))
                )
                seed += 1

        thread = threading.Thread(target=load)
        thread.start()
        try:
            wait_for(lambda: len(cluster.processes("decode")) >= 2, 60, f"no growth; {cluster.logs()}")
            workers = {p["id"]: p["pid"] for p in cluster.processes() if p["role"] != "controller"}
            cluster.kill("controller-1")
        finally:
            done.set()
            thread.join()
        wait_for(
            lambda: [p["id"] for p in cluster.processes("decode")] and len(cluster.processes("decode")) == 1,
            120,
            f"no shrinking; {cluster.logs()}",
        )
        # Workers that lived then are the same processes now; on a busy machine the other pool may have grown meanwhile.
        now = {p["id"]: p["pid"] for p in cluster.processes() if p["role"] != "controller"}
        kept = {name: pid for name, pid in workers.items() if pid is not None and name in now}
        assert len(kept) >= 2
        assert kept.items() <= now.items()
        assert [f for o in outcomes for f in faults(o)] == []
        journal = cluster.run_dir / "controller-1.decisions.jsonl"
        pairs = replay(journal)
        assert all(written == again for written, again in pairs)
        written = [json.loads(line) for line in journal.read_text().splitlines()]
        reasons = {
            fence: {e["decision"]["decode"]["reason"] for e in written if e["fence"] == fence} for fence in (1, 2)
        }
        assert "grow" in reasons[1]
        assert "shrink" in reasons[2], "the one that follows a killed controller goes on, under a fence of its own"
