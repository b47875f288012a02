"""`tandem rollout` under load on this machine: no stream is cut, no two revisions are mixed, and what fails goes back.

The model is slow enough that streams are open at every moment. The last test is the negative control: the same exits
without a drain do cut.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from core.errors import ConfigError
from deploy.local.control import ask
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.fakes.audit import findings, statistics
from tests.fakes.chaos import faults, insistent_storm
from tests.fakes.live_cluster import ROOT, running_cluster, stream_text, wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OLD = ScriptedConfig(mean_length=100_000, step_delay_ms=10.0)
NEW = ScriptedConfig(mean_length=100_000, step_delay_ms=10.0, kv_lanes=5)
"""Other weights: another fingerprint, and another text for every prompt."""
WANT = {"prefill": 1, "decode": 2}
NAME = "slow"
LONG_S = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rollout")
    flags = ["--prefill", "1", "--decode", "2", "--drain-s", "60", "--served-name", NAME]
    with running_cluster(directory, *flags, model=str(prepare_scripted(directory, OLD))) as running:
        yield running


class Load:
    """Streams without a pause, each checked against what its model would say; and a look at the pools meanwhile."""

    def __init__(self, cluster, *truths):
        self._cluster = cluster
        self._truths = truths
        self._done = threading.Event()
        self.outcomes = []
        self.repeated = 0
        self.lowest = dict(WANT)

    def _stream(self):
        number = 0
        while not self._done.is_set():
            prompts = [f"stream {number} {i} of the load" for i in range(12)]
            items = [(prompt, scripted_text(prompt, 60, self._truths[0]), 60) for prompt in prompts]
            found, repeated = asyncio.run(insistent_storm(self._cluster.base_url, NAME, items, 6, number))
            self.outcomes += found
            self.repeated += repeated
            number += 1

    def _look(self):
        while not self._done.wait(0.2):
            processes = self._cluster.processes()
            for role in WANT:
                ready = sum(1 for p in processes if p["role"] == role and p["state"] == "ready")
                self.lowest[role] = min(self.lowest[role], ready)

    def __enter__(self):
        self._threads = [threading.Thread(target=self._stream), threading.Thread(target=self._look)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.outcomes) >= 12, 60, "no load")
        return self

    def __exit__(self, *_):
        self._done.set()
        for thread in self._threads:
            thread.join()

    def told(self, truth):
        return sum(o.text == scripted_text(o.prompt, 60, truth) for o in self.outcomes)

    def assert_whole(self):
        for outcome in self.outcomes:
            for truth in self._truths:
                if outcome.text == scripted_text(outcome.prompt, 60, truth):
                    outcome.expected = outcome.text
        assert [f for o in self.outcomes for f in faults(o)] == []
        assert self.repeated <= 6, f"{self.repeated} connections broke before their answer began"
        assert self.lowest == WANT, "capacity fell below the floor"


def revision(cluster):
    return cluster.status()["revision"]


def pids(cluster):
    return {p["id"]: p["pid"] for p in cluster.processes()}


def test_other_weights_replace_the_old_ones_without_a_cut_stream_or_a_mixed_pair(cluster, tmp_path):
    before, address, now = set(pids(cluster).values()), cluster.base_url, revision(cluster)
    with Load(cluster, OLD, NEW) as load:
        run = cluster.cli("rollout", "--model", str(prepare_scripted(tmp_path, NEW)), timeout_s=LONG_S)
        seen = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= seen + 12, 60, "no load after the rollout")
    assert run.returncode == 0, run.stdout + run.stderr + cluster.logs()
    # A stream whose KV came from one revision and whose tokens from the other would say neither text.
    load.assert_whole()
    assert load.told(OLD) > 0
    assert load.told(NEW) > 0
    assert before.isdisjoint(pids(cluster).values()), "every process is a new one"
    assert cluster.base_url == address
    assert {p["revision"] for p in cluster.processes()} == {now + 1}
    moved = statistics(cluster, audit=False)
    assert sum(s.values.get("engine_recomputed_tokens", 0) for s in moved.values()) == 0
    assert findings(cluster) == []


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [("gateway:http.guard.max_headers=0", "max_headers"), ("decode:engine.page_tokens=32", "never be paired")],
)
def test_a_revision_that_cannot_serve_is_taken_back_before_any_old_process_leaves(cluster, setting, sentence):
    before, now = pids(cluster), revision(cluster)
    run = cluster.cli("rollout", "--set", setting, timeout_s=LONG_S)
    assert run.returncode == 3, run.stdout + run.stderr
    assert f"went back to revision {now}" in run.stderr
    assert sentence in run.stderr
    assert pids(cluster) == before


def test_an_aborted_rollout_returns_to_the_old_revision_without_a_cut_stream(cluster):
    now = revision(cluster)
    with Load(cluster, OLD if now == 1 else NEW) as load:
        command = [sys.executable, "-m", "deploy.cli", "rollout", "--run-dir", str(cluster.run_dir)]
        with subprocess.Popen(
            [*command, "--set", "all:engine.page_tokens=32"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            wait_for(lambda: any(p["revision"] == now + 1 for p in cluster.processes()), 60, "no worker")
            wait_for(lambda: any(p["state"] == "leaving" for p in cluster.processes()), 90, "nobody leaves")
            # Asked here, not by a command: on a busy machine the rollout would be over before a process has started.
            with pytest.raises(ConfigError, match="a rollout is running"):
                ask(cluster.run_dir, {"command": "scale", "pools": {"decode": 3}}, lambda _: None, 30)
            assert ask(cluster.run_dir, {"command": "abort"}, lambda _: None, 30) == {}
            _, errors = running.communicate(timeout=LONG_S)
    assert running.returncode == 3
    assert f"went back to revision {now}: aborted" in errors.decode()
    load.assert_whole()
    assert {role: len(cluster.processes(role)) for role in WANT} == WANT
    assert {p["revision"] for p in cluster.processes()} == {now}
    assert "no rollout is running" in cluster.cli("rollout", "--abort").stderr


def test_the_same_exits_without_a_drain_do_cut_streams(cluster):
    """Negative control of this file and of `tests/e2e/test_scale.py`; resuming is switched off by a rollout."""
    run = cluster.cli("rollout", "--set", "gateway:retries.max_crashes=1", timeout_s=LONG_S)
    assert run.returncode == 0, run.stderr
    newest = [p["role"] for p in cluster.processes() if p["revision"] == revision(cluster)]
    assert newest == ["gateway"], "workers stay where they are"

    def cut_by(victims):
        seen, results = threading.Event(), []
        body = {"model": NAME, "prompt": "cut me", "max_tokens": 2000, "temperature": 0}

        def read():
            with contextlib.suppress(httpx.HTTPError):
                results.append(stream_text(cluster.base_url, body, lambda _: seen.set()))

        reader = threading.Thread(target=read)
        reader.start()
        assert seen.wait(60)
        for victim in victims:
            os.kill(victim["pid"], signal.SIGKILL)
        reader.join(60)
        cluster.wait_ready(4)
        return not results or results[0]["error"] is not None or not results[0]["done"]

    assert cut_by(cluster.processes("decode"))
    assert cut_by(cluster.processes("gateway"))
