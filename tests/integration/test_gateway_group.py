"""A gateway of several processes: one port, workers known to all, crashes healed, streams finished before a goodbye."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from core.errors import TandemError
from tests.fakes.sim_cluster import SimCluster, body, complete, sim_cluster

pytestmark = [pytest.mark.cluster]


async def until(reached):
    """Wait until something is so."""
    async with asyncio.timeout(40):
        while True:
            if await reached():
                return
            await asyncio.sleep(0.05)


async def test_processes_share_the_port_and_the_workers_and_a_crashed_one_comes_back(tmp_path):
    async with sim_cluster(tmp_path, gateway={"processes": 3, "limits.max_queued": 7}) as cluster:
        told = cluster.gateway.facts["processes"]
        assert len({fact["pid"] for fact in told}) == 3
        # Named one of them, a worker joins all.
        await cluster.start_worker("p1")
        await cluster.start_worker("d1")
        addresses = [fact["membership_address"] for fact in told]

        async def all_know():
            try:
                return all([(await cluster.admin.statistics(address)).values["workers"] == 2 for address in addresses])
            except TandemError:  # one of them is being started
                return False

        await until(all_know)
        served = set()
        async with asyncio.timeout(30):
            while len(served) < 2:
                # A connection of its own each time: the system spreads connections, not requests.
                async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                    text, *_ = await complete(client, cluster.url, body())
                    assert text == cluster.text_of((11, 12, 13), 8)
                    for index, address in enumerate(addresses):
                        values = (await cluster.admin.statistics(address)).values
                        served |= {index} if values["scale/ended_samples_total"] else set()
        os.kill(told[1]["pid"], signal.SIGKILL)
        await cluster.logged("gateway-1", "process gateway-1.2 ended with")
        await until(all_know)
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            assert (await complete(client, cluster.url, body()))[0] == cluster.text_of((11, 12, 13), 8)


async def test_a_group_told_to_leave_finishes_its_streams_and_leaves_no_process(tmp_path):
    async with sim_cluster(tmp_path, gateway={"processes": 2}) as cluster:
        await cluster.start_worker("p1")
        await cluster.start_worker("d1", step_s=0.02)
        pids = [fact["pid"] for fact in cluster.gateway.facts["processes"]]
        await asyncio.gather(*(cluster.children[name].ready() for name in ("p1", "d1")))

        async def all_linked():
            told = [fact["membership_address"] for fact in cluster.gateway.facts["processes"]]
            return all([(await cluster.admin.statistics(each)).values["links"] for each in told])

        async def all_run():
            return (await cluster.statistics("d1"))["running"] == 6

        await until(all_linked)
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            running = [asyncio.create_task(complete(client, cluster.url, body(max_tokens=60))) for _ in range(6)]
            await until(all_run)
            cluster.gateway.process.send_signal(signal.SIGTERM)
            for text, finish, _, last in await asyncio.gather(*running):
                assert (text, finish, last) == (cluster.text_of((11, 12, 13), 60), "length", "[DONE]")
        assert await cluster.gateway.process.wait() == 0
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_processes_do_not_outlive_a_killed_parent(tmp_path):
    async with sim_cluster(tmp_path, gateway={"processes": 2, "drain.budget_s": 0.5}) as cluster:
        pids = [fact["pid"] for fact in cluster.gateway.facts["processes"]]
        await cluster.gateway.kill(signal.SIGKILL)

        def alive(pid):
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                return False

        async def all_gone():
            return not any(alive(pid) for pid in pids)

        await until(all_gone)


async def test_a_group_whose_processes_cannot_start_says_so(tmp_path):
    cluster = SimCluster(tmp_path)
    with pytest.raises(AssertionError, match=r"cannot read /nowhere(.|\n)*refused to start"):
        await cluster.start_gateway("gateway-1", processes="2", access__keys_file="/nowhere")
