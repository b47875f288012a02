"""A cluster on a real Ray: two nodes on loopback, real actors, real workers, real signals.

Run by `test_ray.py` in namespaces of their own (PIDs, network), which end everything at their end, whatever a test does. The tests
build on one another, in this order.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from ray.util.placement_group import placement_group_table

from benchmarks.record import write_record
from core.errors import ConfigError
from deploy.local.spec import ClusterSpec
from deploy.ray import client
from deploy.ray.plan import RayPlan
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.deploy.ray.page import commands_of
from tests.fakes.chaos import faults, insistent_storm
from tests.fakes.live_cluster import ROOT, stream_text, wait_for
from tests.fakes.truth import scripted_text

pytestmark = pytest.mark.timeout(600)

SLOW = ScriptedConfig(mean_length=100_000, step_delay_ms=10.0)
"""Slow enough that streams are open at every moment."""
NAME = "slow"
WAIT_S = 90
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DESCRIPTION = """
model: {{path: {model}, served_name: slow}}
prefill: {{replicas: 1, cpus: {cpus}, memory_gib: 0.05, nodes: {nodes}}}
decode: {{replicas: 1, cpus: {cpus}, memory_gib: 0.05}}
transfer: tcp
drain: {{gateway_s: 20.0, prefill_s: 20.0, decode_s: 20.0}}
"""
PAGE = ROOT / "docs" / "deploy-ray.md"
LOSES_A_NODE = bool(os.environ.get("TANDEM_LOSES_A_NODE"))
"""Then no group spans both nodes, and workers are so large that Ray puts some on the second, which the first has room for."""
CONTROL = "with resuming off, a killed decode worker cuts its stream"
SECOND_ON_THIS_HOST = " --dashboard-agent-listen-port=0 --dashboard-agent-grpc-port=0"


def alone_on_loopback() -> None:
    """Let this network namespace have 127.0.0.1, and Ray find no other address of this host."""
    socket.sethostname("localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


class OnRay:
    """What the tests know of the cluster, and the page whose commands they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = commands_of(PAGE.read_text())
        """Commands of the page that no test has run yet."""
        self.phases: dict[str, float] = {}
        self.ready: list[str] = []
        self.streams: dict[str, int] = {}
        """Streams that ended whole, by what happened meanwhile."""

    def run(self, start: str, more: str = "") -> subprocess.CompletedProcess:
        """Run the first command of the page that starts so and was not run yet, as a reader would."""
        line = next(line for line in self.left if line.startswith(start))
        self.left.remove(line)
        return self.shell(line.replace("HEAD_IP", "127.0.0.1") + more)

    def shell(self, line: str) -> subprocess.CompletedProcess:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    def ask(self, body: dict) -> dict:
        return client.ask("default", body, lambda _: None)

    def status(self) -> dict:
        return self.ask({"command": "status"})

    def processes(self, role: str | None = None) -> list[dict]:
        return [p for p in self.status()["processes"] if role is None or p["role"] == role]

    def pids(self, role: str | None = None) -> dict[str, int]:
        return {p["id"]: p["pid"] for p in self.processes(role)}

    def settled(self, **want: int) -> bool:
        """True once the pools have their sizes and every process is ready."""
        found = self.processes()
        sizes = {role: sum(p["role"] == role for p in found) for role in want}
        return sizes == want and all(p["state"] == "ready" for p in found)

    @property
    def base_url(self) -> str:
        return f"http://{self.status()['http_address']}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    alone_on_loopback()
    folder = tmp_path_factory.mktemp("ray")
    (folder / "deploy").symlink_to(ROOT / "deploy")
    nodes, cpus = (1, 3) if LOSES_A_NODE else (2, 0.5)
    model = prepare_scripted(folder, SLOW)
    (folder / "cluster.yaml").write_text(DESCRIPTION.format(model=model, nodes=nodes, cpus=cpus))
    running = OnRay(folder)
    began = time.monotonic()
    small = f" --memory={2**30} --object-store-memory={80 * 2**20} --num-cpus="
    head, second = (16, 8) if LOSES_A_NODE else (8, 8)
    # One by one: they time out at start on a busy machine.
    for more in (f"{small}{head}", f"{small}{second}{SECOND_ON_THIS_HOST}"):
        started = running.run("RAY_AUTH_MODE=disabled ray start", more)
        assert started.returncode == 0, started.stdout + started.stderr
    running.phases["two Ray nodes"] = time.monotonic() - began
    with client.connected("auto"):
        yield running


class Load:
    """Streams without a pause, each checked against what its model says."""

    def __init__(self, cluster: OnRay) -> None:
        self._url = cluster.base_url
        self._done = threading.Event()
        self.outcomes = []
        self.repeated = 0

    def _stream(self) -> None:
        number = 0
        while not self._done.is_set():
            prompts = [f"stream {number} {i} of the load" for i in range(8)]
            items = [(prompt, scripted_text(prompt, 60, SLOW), 60) for prompt in prompts]
            found, repeated = asyncio.run(insistent_storm(self._url, NAME, items, 4, number))
            self.outcomes += found
            self.repeated += repeated
            number += 1

    def __enter__(self):
        self._thread = threading.Thread(target=self._stream)
        self._thread.start()
        wait_for(lambda: len(self.outcomes) >= 8, WAIT_S, "no load")
        return self

    def __exit__(self, *_):
        seen = len(self.outcomes)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: len(self.outcomes) >= seen + 8, WAIT_S, "no load at the end")
        self._done.set()
        self._thread.join()

    def assert_whole(self, cluster: OnRay, what: str) -> None:
        assert [f for o in self.outcomes for f in faults(o)] == []
        assert self.repeated <= 4, f"{self.repeated} connections broke before their answer began"
        cluster.streams[what] = len(self.outcomes)


def groups() -> list[str]:
    return sorted(g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED")


def actor_pid(title: str) -> int:
    return next(p.pid for p in psutil.process_iter() if " ".join(p.cmdline()).startswith(f"ray::{title}"))


def test_up_serves_and_says_what_took_how_long(cluster):
    began = time.monotonic()
    up = cluster.run("tandem up")
    assert up.returncode == 0, up.stdout + up.stderr
    cluster.phases["tandem up"] = time.monotonic() - began
    for worker in ("gateway-1", "prefill-1", "decode-1"):
        assert f"{worker}: ready after" in up.stdout, up.stdout
    answer = stream_text(cluster.base_url, {"model": NAME, "prompt": "hello", "max_tokens": 20, "temperature": 0})
    cluster.phases["first answer, from tandem up"] = time.monotonic() - began
    assert answer["done"], answer
    assert answer["text"] == scripted_text("hello", 20, SLOW)
    cluster.ready = [line for line in up.stdout.splitlines() if ": ready after" in line]
    assert "gateway-1" in cluster.run("tandem status").stdout
    with pytest.raises(ConfigError, match="already runs there"):
        client.start(RayPlan(spec=ClusterSpec(), needs={}), lambda _: None)
    assert {p["domain"] for p in cluster.processes()} <= {"", "a", "b"}


def test_each_pool_scales_alone_under_load_and_its_groups_come_and_go(cluster):
    assert groups() == ["tandem-default/prefill-1"], "prefill workers span two nodes here, decode workers one"
    before = cluster.pids()
    with Load(cluster) as load:
        more = cluster.run("tandem scale")
        wide = cluster.ask({"command": "scale", "pools": {"prefill": 2}})
        assert groups() == ["tandem-default/prefill-1", "tandem-default/prefill-2"]
        cluster.ask({"command": "drain", "worker": "prefill-1"})
        less = cluster.run("tandem drain")
    assert less.returncode == 0, less.stderr
    assert more.returncode == 0, more.stderr
    assert "decode-2: ready" in more.stdout
    assert len(wide["processes"]) == 5
    load.assert_whole(cluster, "each pool scaled out and in, one worker drained")
    assert {k: v for k, v in cluster.pids().items() if k != "prefill-2"} == {
        k: v for k, v in before.items() if k != "prefill-1"
    }, "who was not asked stays who it was"
    assert groups() == ["tandem-default/prefill-2"]


def test_a_killed_controller_cuts_nothing_and_the_next_one_knows_all(cluster):
    before, old = cluster.pids(), actor_pid("ControllerActor")
    with Load(cluster) as load:
        os.kill(old, signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: epoch(cluster) == 2, WAIT_S, "no new controller")
        wait_for(lambda: cluster.settled(prefill=1, decode=1), WAIT_S, "it does not see all")
        cluster.phases["controller back"] = time.monotonic() - began
    load.assert_whole(cluster, "the controller killed")
    assert cluster.pids() == before
    assert actor_pid("ControllerActor") != old
    assert groups() == ["tandem-default/prefill-2"]


def epoch(cluster) -> int:
    try:
        return cluster.status()["epoch"]
    except ConfigError:
        return 0


def test_workers_and_gateway_roll_under_load(cluster):
    before = set(cluster.pids().values())
    with Load(cluster) as load:
        run = cluster.run("tandem rollout", " --set gateway:retries.max_crashes=1")
    assert run.returncode == 0, run.stdout + run.stderr
    load.assert_whole(cluster, "gateway and workers rolled")
    assert before.isdisjoint(cluster.pids().values()), "every process is a new one"


def test_a_killed_supervisor_is_replaced_under_a_new_name(cluster):
    name = next(iter(cluster.pids("decode")))
    client.ray.kill(client.ray.get_actor(name, namespace="tandem-default"), no_restart=True)
    wait_for(lambda: name not in cluster.pids("decode") and cluster.settled(decode=1), WAIT_S, "no replacement")
    # Its process drains: it may serve for 15 s more, and nobody else may be called like it.
    cluster.ask({"command": "scale", "pools": {"decode": 2}})
    assert name not in cluster.pids("decode")
    cluster.ask({"command": "scale", "pools": {"decode": 1}})


def test_the_same_exit_without_a_drain_does_cut_a_stream(cluster):
    """Negative control: resuming is off since the rollout above, so a killed worker shows."""
    seen, results = threading.Event(), []
    body = {"model": NAME, "prompt": "cut me", "max_tokens": 2000, "temperature": 0}

    def read() -> None:
        with contextlib.suppress(httpx.HTTPError):
            results.append(stream_text(cluster.base_url, body, lambda _: seen.set()))

    reader = threading.Thread(target=read)
    reader.start()
    assert seen.wait(WAIT_S)
    killed = cluster.pids("decode")
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    reader.join(WAIT_S)
    assert not results or results[0]["error"] is not None or not results[0]["done"]
    # What the controller tells may be older than the kill.
    wait_for(lambda: cluster.pids("decode") != killed and cluster.settled(decode=1), WAIT_S, "it does not come back")


@pytest.mark.skipif(not LOSES_A_NODE, reason="takes a node away that other tests need")
def test_a_lost_node_is_made_up_for_on_the_other_one(cluster):
    cluster.ask({"command": "scale", "pools": {"prefill": 2, "decode": 2}})
    raylet, lost = a_node_without(cluster.pids("gateway"), cluster)
    assert lost, "no worker is on the node that is to be lost"
    with Load(cluster) as load:
        dying = [raylet, *raylet.children(recursive=True)]
        for process in dying:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        began = time.monotonic()
        wait_for(lambda: cluster_settled(cluster, lost), WAIT_S, "the lost workers are not replaced")
        cluster.phases[f"node with {len(lost)} workers lost, replaced"] = time.monotonic() - began
    load.assert_whole(cluster, "a node lost")


def a_node_without(pids: dict[str, int], cluster) -> tuple[psutil.Process, set[str]]:
    """The raylet of the node that holds none of these processes, and the names of the workers that it does hold."""
    for raylet in (p for p in psutil.process_iter() if p.name() == "raylet"):
        inside = {p.pid for p in raylet.children(recursive=True)}
        if inside.isdisjoint(pids.values()):
            return raylet, {name for name, pid in cluster.pids().items() if pid in inside}
    raise AssertionError("every node holds one of them")


def cluster_settled(cluster, lost: set[str]) -> bool:
    try:
        return lost.isdisjoint(cluster.pids()) and cluster.settled(prefill=2, decode=2)
    except ConfigError:  # the controller was on that node, and starts again
        return False


def test_down_leaves_nothing(cluster):
    pids = list(cluster.pids().values())
    down = cluster.run("tandem down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert groups() == []
    assert [
        a for a in client.ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "tandem-default"
    ] == []
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    with pytest.raises(ConfigError, match="tandem up --on ray"):
        cluster.status()


def test_every_command_of_the_page_was_run(cluster):
    """Those that need no cluster are run by `test_manifests.py`."""
    assert [line for line in cluster.left if not line.startswith("tandem validate")] == []


def test_cost(cluster):
    """What is left of CI's budget depends on the CPU seconds of all that."""
    times = [p.cpu_times() for p in psutil.process_iter()]
    total = round(sum(t.user + t.system + t.children_user + t.children_system for t in times))
    print(f"CPU seconds: {total}")
    if name := os.environ.get("TANDEM_RECORD"):
        result = {
            "seconds": {what: round(seconds, 1) for what, seconds in cluster.phases.items()},
            "processes": cluster.ready,
            "streams_whole": cluster.streams,
            "streams_cut": 0,  # else an earlier test has failed and this one does not run
            **({} if LOSES_A_NODE else {"negative_control": CONTROL}),
            "cpu_seconds_of_all_tests": total,
            "load_average": os.getloadavg(),
        }
        write_record(name, result, note="2 CPU cores shared with other work; scripted model; 2 Ray nodes on loopback")
