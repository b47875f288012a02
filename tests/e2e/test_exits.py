"""SIGTERM at six points of a request's life, pools that vanish and come back, many starts at once, and secrets.

One prefill and one decode worker: whoever is told to leave has nobody to hand its work to, and must finish it.
"""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from deploy.local.control import ask
from deploy.sweep import leftovers
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.fakes.live_cluster import ROOT, running_cluster, serving, stream_text, wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MODEL = ScriptedConfig(mean_length=100_000, step_delay_ms=20.0)
LONG = "A long prompt that the prefill worker computes in many chunks, one for each step. " * 60
ANSWER = 30
PAGE = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exits")
    settings = (
        "all:engine.chunk_tokens=64",
        "all:engine.num_pages=2048",
        f"all:engine.page_tokens={PAGE}",
        # A worker is stopped for a moment below; nobody shall take that for its end.
        "all:transfer.lease_ttl_s=60",
        "all:transfer.progress_timeout_s=30",
        "gateway:membership.ttl_s=30",
    )
    flags = ["--transfer", "tcp", "--drain-s", "60", "--served-name", "slow"]
    for setting in settings:
        flags += ["--set", setting]
    with running_cluster(directory, *flags, model=str(prepare_scripted(directory, MODEL))) as running:
        yield running


class Stream:
    """One client's stream, read on a thread of its own."""

    def __init__(self, cluster, prompt, max_tokens=ANSWER):
        self.prompt = prompt
        self.computed_before = 0.0
        self.expected = scripted_text(prompt, max_tokens, MODEL)
        self.length = 0
        body = {"model": "slow", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future = self._pool.submit(stream_text, cluster.base_url, body, self._take, 120)

    def _take(self, text):
        self.length = len(text)

    def assert_whole(self):
        with self._pool:
            result = self._future.result(120)
        assert (result["status"], result["error"], result["finish"]) == (200, None, "length")
        assert result["done"]
        assert result["text"] == self.expected


def values(cluster, worker_id):
    """The statistics of one worker; others may be unable to answer."""
    secret = (cluster.run_dir / "secret").read_text().strip().encode()
    client = AdminClient(Proof(secret, fresh_incarnation()))
    return asyncio.run(client.statistics(cluster.worker(worker_id)["address"], audit=False)).values


def reach(cluster, worker_id, name, least=1):
    wait_for(lambda: values(cluster, worker_id)[name] >= least, 60, f"{worker_id} has no {least} {name}")


def leave(cluster, worker_id):
    os.kill(cluster.worker(worker_id)["pid"], signal.SIGTERM)


def queued(cluster, _):
    """One chunk a step goes to the first prompt; the others wait."""
    others = [Stream(cluster, f"{number} at the same time. {LONG}") for number in range(2)]
    reach(cluster, "prefill-1", "engine_sequences", 2)
    leave(cluster, "prefill-1")
    return others


def prefilling(cluster, _):
    reach(cluster, "prefill-1", "engine_sequences")
    leave(cluster, "prefill-1")


def prefilled(cluster, stream):
    """The decode worker is stopped until the prompt is computed and its prefill worker has begun to leave."""
    reach(cluster, "prefill-1", "transfer_leased_pages")
    decode = cluster.worker("decode-1")["pid"]
    probe = f"http://{cluster.worker('prefill-1')['http_address']}/readyz"
    os.kill(decode, signal.SIGSTOP)
    try:
        computed = stream.computed_before + len(stream.prompt) - PAGE
        wait_for(lambda: values(cluster, "prefill-1")["engine_prefill_tokens"] >= computed, 60, "it is not computed")
        assert values(cluster, "prefill-1")["transfer_leased_pages"] > 0, "its pages were taken already"
        leave(cluster, "prefill-1")
        wait_for(lambda: "draining" in httpx.get(probe, timeout=60).text, 60, "it does not leave")
    finally:
        os.kill(decode, signal.SIGCONT)


def transferring(cluster, _):
    reach(cluster, "decode-1", "engine_pages_landing")
    leave(cluster, "decode-1")


def decoding(cluster, stream):
    wait_for(lambda: stream.length >= 3, 60, "no text")
    leave(cluster, "decode-1")


def last_token(cluster, stream):
    wait_for(lambda: stream.length >= ANSWER - 1, 60, "no text")
    leave(cluster, "decode-1")


@pytest.mark.parametrize("point", [queued, prefilling, prefilled, transferring, decoding, last_token])
def test_a_stream_completes_when_its_worker_is_told_to_leave_at(cluster, point):
    computed = values(cluster, "prefill-1")["engine_prefill_tokens"]
    stream = Stream(cluster, f"{point.__name__}: {LONG}")
    stream.computed_before = computed
    others = point(cluster, stream) or []
    for each in (stream, *others):
        each.assert_whole()
    [left] = wait_for(lambda: [p for p in cluster.processes() if p["restarts"]], 60, "nobody left")
    # The launcher would start it again, later each time; a new one in its place starts at once.
    for command in ({"command": "drain", "worker": left["id"]}, {"command": "scale", "pools": {left["role"]: 1}}):
        ask(cluster.run_dir, command, lambda _: None, 60)


@pytest.mark.parametrize("roles", [("decode",), ("prefill",), ("decode", "prefill")])
def test_pools_that_vanish_mean_503_with_a_time_and_service_when_they_are_back(cluster, roles):
    [gateway] = cluster.processes("gateway")
    body = {"model": "slow", "prompt": "who is there", "max_tokens": 4, "temperature": 0}
    for role in roles:
        cluster.kill(f"{role}-1")

    def refused():
        answer = httpx.post(cluster.base_url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code in {200, 503}, answer.text
        return answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1

    if "decode" in roles:
        wait_for(refused, 60, "never 503")
    cluster.wait_ready(3)
    Stream(cluster, "they are back", 8).assert_whole()
    assert cluster.processes("gateway") == [gateway], "the gateway was not restarted"


def test_the_secret_is_in_no_argument_environment_log_or_page(cluster):
    secret = (cluster.run_dir / "secret").read_text().strip()
    assert len(secret) == 64
    pages = [cluster.logs(), str(cluster.status()), cluster.log.read_text()]
    for process in cluster.processes():
        address = process.get("listener_address") or process["http_address"]
        pages += [httpx.get(f"http://{address}{path}", timeout=60).text for path in ("/statusz", "/metrics")]
        pages += [Path(f"/proc/{process['pid']}/{name}").read_text() for name in ("cmdline", "environ")]
    assert not [page for page in pages if secret in page]
    assert any("decode-1" in page for page in pages), "the pages are those of this cluster"


def start_up(run_dir, log):
    command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(run_dir), "--port", "0", "--drain-s", "5"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--model", "scripted"], cwd=ROOT, stdout=out, stderr=out)
    wait_for(lambda: serving(log) or process.poll() is not None, 120, "it does not serve")
    assert process.poll() is None, log.read_text()
    return process


def test_processes_of_a_killed_launcher_drain_and_another_one_starts(tmp_path):
    first = start_up(tmp_path, tmp_path / "first.txt")
    pids = [p["pid"] for p in ask(tmp_path, {"command": "status"}, lambda _: None, 30)["processes"]]
    first.kill()
    first.wait()
    # Its socket stays, and the next launcher replaces it.
    wait_for(lambda: [f for f in leftovers(pids, tmp_path) if "socket" not in f] == [], 60, "processes stay")
    second = start_up(tmp_path, tmp_path / "second.txt")
    second.terminate()
    assert second.wait(60) == 0
    assert leftovers(pids, tmp_path) == []


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_eight_workers_that_start_at_once_never_clash_over_a_port(tmp_path, rounds):
    for number in range(rounds):
        with running_cluster(tmp_path / str(number), "--prefill", "4", "--decode", "4") as cluster:
            workers = [p for p in cluster.processes() if p["role"] != "gateway"]
            assert [p["restarts"] for p in workers] == [0] * 8
            assert len({p[name] for p in workers for name in ("address", "http_address")}) == 16
