"""Workers as real processes, real signals, and what is left of them."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest

from core.request import StopRules
from core.stream import Finished, NeedPrefill, Place
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig, scripted_reply
from tests.fakes.worker_cluster import ROOT, WorkerCluster, ask, segments

MODEL = ScriptedConfig(mean_length=40, step_delay_ms=20.0)
PROMPT = tuple(
    b"a long prompt that takes several chunks of a slow model to compute, so that there is time to kill " * 2
)


def truth(prompt, max_tokens=24, **options):
    return scripted_reply(MODEL, prompt, max_tokens, **options)


@pytest.fixture
async def cluster(tmp_path):
    before = segments()
    async with WorkerCluster(tmp_path, prepare_scripted(tmp_path, MODEL)) as made:
        yield made
    assert segments() <= before, "a shared segment was left behind"


@pytest.mark.cluster
async def test_a_killed_prefill_worker_is_replaced_and_the_answer_is_whole(cluster):
    first, second, decode = await cluster.spawn("prefill", "prefill", "decode")
    gateway = await cluster.gateway(decode)
    gateway.submit(1, ask(PROMPT), first.target)
    await cluster.busy(first, "engine_rows_used")
    first.signal(signal.SIGKILL)
    await gateway.until(lambda: gateway.of(1, NeedPrefill))
    need = gateway.of(1, NeedPrefill)[0]
    assert (need.failed, need.code) == (first.id, "worker_lost")
    assert 1 not in gateway.tokens
    gateway.send(Place(handle=1, prefill=second.target))
    assert isinstance(await gateway.ended(1), Finished)
    assert gateway.tokens[1] == truth(PROMPT)
    assert await first.exit_code() == -signal.SIGKILL
    for worker in (second, decode):
        await cluster.settled(worker)
    # The dead worker's segment is swept by the next one that starts.
    await cluster.spawn("prefill")
    assert not any(str(first.incarnation) in name for name in segments())


@pytest.mark.cluster
async def test_a_stopped_prefill_worker_is_given_up_in_time(cluster):
    sets = ["transfer.lease_ttl_s=0.6", "transfer.progress_timeout_s=0.5", "transfer.prepare_timeout_s=0.5"]
    prefill, decode = await cluster.spawn("prefill", "decode", sets=sets)
    gateway = await cluster.gateway(decode)
    prefill.signal(signal.SIGSTOP)
    gateway.submit(1, ask(PROMPT), prefill.target)
    await gateway.until(lambda: gateway.of(1, NeedPrefill))
    gateway.send(Place(handle=1, prefill=None))
    assert isinstance(await gateway.ended(1), Finished)
    assert gateway.tokens[1] == truth(PROMPT)
    prefill.signal(signal.SIGCONT)
    for worker in (prefill, decode):
        await cluster.settled(worker)


@pytest.mark.cluster
async def test_a_killed_decode_worker_leaves_no_lease_at_its_source(cluster):
    prefill, decode = await cluster.spawn("prefill", "decode")
    gateway = await cluster.gateway(decode)
    for handle in range(4):
        gateway.submit(handle, ask(PROMPT[handle:], request_id=f"req-{handle}"), prefill.target)
    await cluster.busy(prefill, "transfer_leases")
    decode.signal(signal.SIGKILL)
    await decode.exit_code()
    await cluster.settled(prefill)
    (successor,) = await cluster.spawn("decode")
    tokens, _ = await (await cluster.gateway(successor)).answer(1, ask(PROMPT), prefill.target)
    assert tokens == truth(PROMPT)


@pytest.mark.cluster
async def test_sigterm_finishes_the_running_request_then_the_process_leaves_with_0(cluster):
    prefill, decode = await cluster.spawn("prefill", "decode")
    gateway = await cluster.gateway(decode)
    gateway.submit(1, ask(PROMPT, stop=StopRules(max_tokens=40, ignore_eos=True)), prefill.target)
    await gateway.until(lambda: gateway.tokens.get(1))
    for worker in (decode, prefill):
        worker.signal(signal.SIGTERM)
    await cluster.membership.until("left: draining", 2)
    assert isinstance(await gateway.ended(1), Finished)
    assert gateway.tokens[1] == truth(PROMPT, 40, ignore_eos=True)
    assert [await worker.exit_code() for worker in (decode, prefill)] == [0, 0]
    assert not list(cluster.directory.glob("*.json"))


def run_to_exit(arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=40, check=False
    )


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "sets", "says"),
    [
        ("prefill", ["engine.page_tokns=8"], "page_tokns"),
        ("decode", ["prefill.mode=sometimes"], "mode"),
        ("prefill", ["model.path=/nowhere"], "/nowhere"),
        ("decode", ["engine.num_pages=2000000000"], "shared memory"),
        ("prefill", ["worker.secret_file=/nowhere"], "secret"),
        ("decode", ['transfer.transports=["carrier-pigeon"]'], "carrier-pigeon"),
    ],
    ids=["unknown key", "wrong value", "no model", "no memory", "no secret", "unknown transport"],
)
async def test_what_is_wrong_at_the_start_is_one_plain_sentence_and_exit_code_3(cluster, kind, sets, says):
    done = await asyncio.to_thread(run_to_exit, cluster.arguments(kind, sets))
    plain = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(plain)) == (3, 1), done.stderr
    assert says in plain[0]


@pytest.mark.cluster
@pytest.mark.parametrize("key", ["worker.port", "worker.http_port"])
async def test_a_port_in_use_is_named_with_exit_code_3(cluster, key):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = await asyncio.to_thread(run_to_exit, cluster.arguments("decode", [f"{key}={port}"]))
    plain = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(plain)) == (3, 1), done.stderr
    assert str(port) in plain[0]


@pytest.mark.cluster
async def test_a_corrupted_model_file_is_one_plain_sentence_and_exit_code_3(cluster):
    config = next(cluster.model_dir.glob("tokenizer.json"))
    config.write_bytes(config.read_bytes()[:-20])
    done = await asyncio.to_thread(run_to_exit, cluster.arguments("prefill"))
    plain = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(plain)) == (3, 1), done.stderr
    assert "tokenizer.json" in plain[0]
