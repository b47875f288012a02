"""Failures in the middle of a request, on a real cluster with real signals: the text stays right, nothing stays held.

The model is slow enough that a signal meets a request under way. Every test ends with the audits of all workers and of
the gateway, and says by a count that the fault was felt.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import random
import re
import signal
import threading
import time

import httpx
import pytest

from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from tests.fakes.audit import findings, gateway_findings, held_pages, statistics
from tests.fakes.chaos import Outcome, faults, storm
from tests.fakes.live_cluster import running_cluster, stream_text, wait_for
from tests.fakes.truth import scripted_text

pytestmark = [pytest.mark.cluster]

MODEL = ScriptedConfig(mean_length=100_000, step_delay_ms=15.0)
CHUNK = 64
LONG = "A long prompt that the prefill worker computes in many chunks, one for each step. " * 30
QUICK = (
    "all:engine.page_tokens=16",
    "all:engine.num_pages=2048",
    f"all:engine.chunk_tokens={CHUNK}",
    "all:transfer.lease_ttl_s=4",
    "all:transfer.orphan_ttl_s=3",
    "all:transfer.prepare_timeout_s=1.5",
    "all:transfer.progress_timeout_s=1",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("failures")
    model = prepare_scripted(directory, MODEL)
    flags = ["--prefill", "2", "--decode", "2", "--transfer", "tcp", "--drain-s", "1", "--served-name", "slow"]
    for value in QUICK:
        flags += ["--set", value]
    with running_cluster(directory, *flags, model=str(model)) as running:
        yield running


class Stream:
    """One client's stream, read on a thread of its own."""

    def __init__(self, cluster, prompt, max_tokens):
        self.expected = scripted_text(prompt, max_tokens, MODEL)
        self.seen = threading.Event()
        self.length = 0
        body = {"model": "slow", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future = self._pool.submit(stream_text, cluster.base_url, body, self._take, 60)

    def _take(self, text):
        self.length = len(text)
        self.seen.set()

    def result(self):
        with self._pool:
            return self._future.result(60)

    def assert_whole(self):
        result = self.result()
        assert (result["status"], result["error"], result["finish"]) == (200, None, "length")
        assert result["done"]
        assert result["text"] == self.expected


def busy(cluster, role, name):
    """The worker of a role in which a count is above zero, once there is one."""

    def look():
        for worker, stats in statistics(cluster, audit=False).items():
            if worker.startswith(role) and stats.values.get(name, 0) > 0:
                return worker
        return None

    return wait_for(look, 60, f"no {role} worker has {name}")


def total(cluster, name):
    return sum(stats.values.get(name, 0) for stats in statistics(cluster, audit=False).values())


def metric(cluster, name):
    text = httpx.get(cluster.base_url + "/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def settle(cluster, timeout_s=60.0):
    """Wait until all is given back, and say what is not."""
    end = time.monotonic() + timeout_s
    while found := findings(cluster) + gateway_findings(cluster):
        assert time.monotonic() < end, found
        time.sleep(0.1)


def members(cluster):
    """Workers that the gateway may choose now, by id."""
    listener = cluster.processes("gateway")[0]["listener_address"]
    told = httpx.get(f"http://{listener}/statusz", timeout=60).json()
    return sorted(worker["id"] for worker in told["workers"] if worker["routable"])


def pools(cluster, prefill, decode):
    """Bring the pools to a size, and wait until the gateway sees exactly those workers."""
    count = prefill + decode
    for role, wanted in (("prefill", prefill), ("decode", decode)):
        if len(cluster.processes(role)) != wanted:
            assert cluster.cli("scale", f"{role}={wanted}").returncode == 0
    cluster.wait_ready(count + 1)
    wait_for(lambda: len(members(cluster)) == count, 60, f"not {count} members: {members(cluster)}")


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_audits_of_these_tests_see_a_request_that_is_under_way(cluster):
    stream = Stream(cluster, "seen by audits ", 150)
    assert stream.seen.wait(60)
    assert held_pages(cluster) > 0
    assert findings(cluster) != []
    wait_for(lambda: gateway_findings(cluster) != [], 60, "the gateway counts nothing")
    stream.assert_whole()
    settle(cluster)


@pytest.mark.parametrize("prefill", [2, 1])
def test_a_prefill_worker_killed_in_the_middle_of_a_long_prompt(cluster, prefill):
    """With a second one the prompt is computed there, without one where the text will be."""
    pools(cluster, prefill, 2)
    prompt = f"{prefill} workers. {LONG}"
    before, placed = (
        total(cluster, "worker_need_prefill_total"),
        metric(cluster, "tandem_gateway_prefill_placements_total"),
    )
    stream = Stream(cluster, prompt, 30)
    worker = busy(cluster, "prefill", "transfer_leased_pages")
    assert not stream.seen.is_set(), "the prompt was short"
    cluster.kill(worker)
    stream.assert_whole()
    assert total(cluster, "worker_need_prefill_total") == before + 1
    assert metric(cluster, "tandem_gateway_prefill_placements_total") == placed + 1
    cluster.wait_ready(prefill + 3)
    settle(cluster)


def test_a_prefill_worker_that_is_stopped_while_pages_land_and_then_goes_on(cluster):
    pools(cluster, 2, 2)
    stream = Stream(cluster, f"stopped. {LONG}", 30)
    busy(cluster, "decode", "engine_pages_landing")
    worker = busy(cluster, "prefill", "transfer_leased_pages")
    with stopped(cluster.worker(worker)["pid"]):
        stream.assert_whole()
    settle(cluster)
    assert worker in {p["id"] for p in cluster.processes("prefill")}
    assert cluster.worker(worker)["state"] == "ready", "it was stopped, not killed"


def test_a_decode_worker_that_is_stopped_for_5_seconds_in_the_middle_of_its_streams(cluster):
    pools(cluster, 2, 2)
    resumed = metric(cluster, "tandem_gateway_resumes_total")
    streams = [Stream(cluster, f"number {number} of a stopped worker ", 250) for number in range(6)]
    for stream in streams:
        assert stream.seen.wait(60)
    worker = busy(cluster, "decode", "worker_requests_running")
    with stopped(cluster.worker(worker)["pid"]):
        time.sleep(5.0)
    for stream in streams:
        stream.assert_whole()
    assert metric(cluster, "tandem_gateway_resumes_total") > resumed
    settle(cluster)


def test_a_decode_worker_killed_after_the_first_token_costs_no_second_prefill(cluster):
    """Only the half that was lost is done again: the prompt's pages are still where they were computed."""
    pools(cluster, 2, 2)

    def prefilled():
        told = statistics(cluster, audit=False)
        return sum(told[name].values["engine_prefill_tokens"] for name in ("prefill-1", "prefill-2"))

    before = prefilled()
    stream = Stream(cluster, f"only half. {LONG}", 200)
    assert stream.seen.wait(60)
    computed = prefilled() - before
    assert computed >= len(LONG)
    cluster.kill(busy(cluster, "decode", "worker_requests_running"))
    stream.assert_whole()
    assert prefilled() - before - computed <= 2 * CHUNK, "the prompt was computed again"
    cluster.wait_ready(5)
    settle(cluster)


def test_a_killed_gateway_is_restarted_and_what_it_asked_for_is_given_back(cluster):
    pools(cluster, 2, 2)
    streams = [Stream(cluster, f"number {number} of a lost gateway {LONG[: 80 * number]}", 2000) for number in range(6)]
    for stream in streams:  # one that comes later would be answered by the next gateway
        assert stream.seen.wait(60)
    assert held_pages(cluster) > 0, "nothing is held"
    cluster.kill("gateway-1")
    for stream in streams:
        with pytest.raises(httpx.HTTPError):
            stream.result()
    # The whole answers would take 30 s.
    wait_for(lambda: held_pages(cluster) == 0, 20, "pages of the lost gateway are still held")
    cluster.wait_ready(5)
    wait_for(lambda: len(members(cluster)) == 4, 60, "workers did not come back")
    Stream(cluster, "after the restart ", 10).assert_whole()
    settle(cluster)


def test_a_drain_that_runs_out_of_budget_moves_streams_without_a_trace(cluster):
    pools(cluster, 2, 2)
    resumed = metric(cluster, "tandem_gateway_resumes_total")
    streams = [Stream(cluster, f"number {number} of a drained worker ", 400) for number in range(6)]
    for stream in streams:
        assert stream.seen.wait(60)
    worker = busy(cluster, "decode", "worker_requests_running")
    run = cluster.cli("drain", worker)
    assert run.returncode == 0, run.stderr
    for stream in streams:
        stream.assert_whole()
    assert metric(cluster, "tandem_gateway_resumes_total") > resumed, "the budget was long enough: nothing was shown"
    settle(cluster)


def test_two_storms_of_clients_that_leave(cluster):
    pools(cluster, 2, 2)

    async def both():
        def items(name):
            prompts = [f"{name} {number} {LONG[: 37 * number % 700]}" for number in range(60)]
            return [(prompt, scripted_text(prompt, 12, MODEL), 12) for prompt in prompts]

        storms = [
            storm(cluster.base_url, "slow", items(name), concurrency=30, cancel_share=0.8, seed=seed)
            for seed, name in enumerate(("first", "second"))
        ]
        return await asyncio.gather(*storms)

    outcomes: list[Outcome] = [outcome for outcomes in asyncio.run(both()) for outcome in outcomes]
    assert [fault for outcome in outcomes for fault in faults(outcome)] == []
    assert sum(outcome.cancelled for outcome in outcomes) > 60
    settle(cluster)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_and_stops_under_load_for_two_minutes(tmp_path, seed):
    """Any worker may be killed or stopped at any time, one at a time, while clients come, stay and leave."""
    rng = random.Random(seed)
    model = prepare_scripted(tmp_path, MODEL)
    flags = ["--prefill", "2", "--decode", "2", "--served-name", "slow", "--transfer", rng.choice(("tcp", "shm"))]
    for value in (*QUICK, "all:engine.audit_every_steps=4"):
        flags += ["--set", value]
    with running_cluster(tmp_path, *flags, model=str(model)) as cluster:
        done = threading.Event()
        events = []

        def trouble():
            kills = {p["id"]: 0 for p in cluster.processes() if p["role"] != "gateway"}
            end = time.monotonic() + 120
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.2, 2.5))
                worker = rng.choice(sorted(kills))
                # The launcher holds a process that dies too often.
                if rng.random() < 0.5 and kills[worker] < 5:
                    kills[worker] += 1
                    cluster.kill(worker)
                    wait_for(lambda w=worker: cluster.worker(w)["state"] == "ready", 60, f"{worker} is not back")
                    events.append(f"kill {worker}")
                else:
                    seconds = rng.uniform(0.1, 7.0)
                    with stopped(cluster.worker(worker)["pid"]):
                        time.sleep(seconds)
                    events.append(f"stop {worker} for {seconds:.1f} s")
            done.set()

        thread = threading.Thread(target=trouble)
        thread.start()
        outcomes = []
        number = 0
        while thread.is_alive():
            items = []
            for _ in range(60):
                number += 1
                prompt = f"{seed} {number} {LONG[: rng.choice((0, 50, 400, 1500))]}"
                max_tokens = rng.randint(1, 120)
                items.append((prompt, scripted_text(prompt, max_tokens, MODEL), max_tokens))
            run = storm(cluster.base_url, "slow", items, concurrency=24, cancel_share=0.2, seed=number)
            outcomes += asyncio.run(run)
        thread.join()
        assert done.is_set(), f"the trouble itself failed after {events}"
        found = [fault for outcome in outcomes for fault in faults(outcome)]
        assert found == [], f"{len(found)} of {len(outcomes)}; {events}"
        cluster.wait_ready(5)
        settle(cluster)
        print(f"{len(outcomes)} requests, {sum(o.cancelled for o in outcomes)} left early, {len(events)} events")
