"""How a gateway process starts, refuses to start, and leaves."""

import asyncio
import json
import signal
import socket
import sys

import pytest

from core.config import native_environment
from tests.fakes.sim_cluster import ROOT, SimCluster, sim_cluster

pytestmark = [pytest.mark.cluster]


async def run_gateway(*sets):
    environment = native_environment(threads=1)
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'proto'}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *[word for each in ("log_level=ERROR", *sets) for word in ("--set", each)],
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(50):
        _, errors = await process.communicate()
    # gRPC's core writes a line of its own when a port is taken, before ours.
    return process.returncode, [line for line in errors.decode().splitlines() if "add_port.cc" not in line]


async def test_what_is_wrong_at_start_is_one_sentence_and_exit_code_3(tmp_path):
    model = SimCluster(tmp_path).model
    good = (f"model.path={model}", "membership.port=0", "http.port=0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            (*good, f"http.port={port}"): f"cannot listen on 127.0.0.1:{port}",
            (*good, f"membership.port={port}"): f"cannot listen for gRPC on 127.0.0.1:{port}",
            (*good, f"listener.port={port}"): f"cannot listen for HTTP on 127.0.0.1:{port}",
            (*good, "model.path=/nowhere"): "/nowhere/tokenizer.json does not exist",
            (*good, f"secret_file={tmp_path}/none"): "cannot read the cluster secret",
            (*good, "routing.policy=best"): "routing.policy",
            (*good, "run_dir=/nowhere"): "cannot write /nowhere/gateway-1.json",
        }
        results = await asyncio.gather(*(run_gateway(*case) for case in cases))
    for (code, lines), sentence in zip(results, cases.values(), strict=True):
        assert (code, len(lines)) == (3, 1), lines
        assert sentence in lines[0]


async def test_the_ready_file_names_bound_addresses_and_goes_with_the_process(tmp_path):
    async with sim_cluster(tmp_path) as cluster:
        path = cluster.run_dir / "gateway-1.json"
        facts = json.loads(path.read_text())
        assert facts["pid"] == cluster.gateway.process.pid
        assert {"http_address", "membership_address", "listener_address", "incarnation"} <= set(facts)
        description = await cluster.admin.describe(facts["membership_address"])
        assert (description.name, description.incarnation) == ("gateway-1", facts["incarnation"])
        assert await cluster.gateway.kill(signal.SIGTERM) == 0
        assert not path.exists()


async def test_an_operator_drains_a_gateway(tmp_path):
    async with sim_cluster(tmp_path) as cluster:
        await cluster.admin.drain(cluster.gateway.facts["membership_address"], 60.0)
        async with asyncio.timeout(30):
            assert await cluster.gateway.process.wait() == 0
