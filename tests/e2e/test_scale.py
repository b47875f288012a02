"""`tandem scale` under load, each pool alone and both ways: no failed request; status and down as a person uses them."""

import asyncio
import threading

import msgspec
import pytest

from engine.models.builtin import SCRIPTED, prepare_scripted
from tests.fakes.chaos import faults, storm, work
from tests.fakes.live_cluster import running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_scaling_out_and_in_under_load_fails_no_request(tmp_path):
    # Slow enough that streams are open at every moment, and that they leave the processes that start some time.
    model = prepare_scripted(tmp_path, msgspec.structs.replace(SCRIPTED, step_delay_ms=10.0))
    with running_cluster(tmp_path, "--served-name", "scripted", model=str(model)) as cluster:
        done = threading.Event()
        outcomes = []

        def load():
            seed = 0
            while not done.is_set() or seed < 1:
                items = work(16, seed)
                outcomes.extend(
                    asyncio.run(storm(cluster.base_url, "scripted", items, concurrency=4, cancel_share=0, seed=seed))
                )
                seed += 1

        thread = threading.Thread(target=load)
        thread.start()

        def pids(role):
            return {p["pid"] for p in cluster.processes(role)}

        said = {}
        for role, other, count in (
            ("decode", "prefill", 2),
            ("prefill", "decode", 2),
            ("prefill", "decode", 1),
            ("decode", "prefill", 1),
        ):
            before, untouched = pids(role), pids(other)
            said[role, count] = cluster.cli("scale", f"{role}={count}", timeout_s=200)
            assert pids(other) == untouched, "the other pool is not touched"
            assert len(pids(role)) == count
            assert before < pids(role) or pids(role) < before, "who stays is who was there"
        done.set()
        thread.join()
        for run in said.values():
            assert run.returncode == 0, run.stderr + cluster.logs()
        assert [f for o in outcomes for f in faults(o)] == []
        assert sorted(p["id"] for p in cluster.processes()) == ["decode-1", "gateway-1", "prefill-1"]
        assert "decode-2: ready" in said["decode", 2].stdout
        assert "prefill-2: gone" in said["prefill", 1].stdout
        wrong = cluster.cli("scale", "decode=0")
        assert wrong.returncode == 3
        assert (
            wrong.stderr.strip()
            == "tandem: at least one decode worker must stay; use `tandem down` to stop the cluster"
        )
        status = cluster.cli("status")
        assert status.stdout.startswith("cluster default: scripted at http://")
        down = cluster.cli("down")
        assert down.returncode == 0, down.stderr
        assert cluster.process.wait(60) == 0
