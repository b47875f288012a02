"""Workers as real processes, real signals, and what is left of them.

The process that a test signals is real; its peers run in the test's own process, which starts them faster.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import sys

import pytest

from core.request import StopRules
from core.stream import Finished, NeedPrefill, Place
from decode_worker.__main__ import main as decode_main
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from decode_worker.ledger import RequestLedger
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig, scripted_reply
from prefill_worker.__main__ import main as prefill_main
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from tests.fakes.worker_cluster import ROOT, WorkerCluster, ask

MODEL = ScriptedConfig(mean_length=40, step_delay_ms=20.0)
SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
PROMPT = tuple(
    b"a long prompt that takes several chunks of a slow model to compute, so that there is time to kill " * 2
)


def truth(prompt, max_tokens=24, **options):
    return scripted_reply(MODEL, prompt, max_tokens, **options)


@pytest.fixture
async def cluster(tmp_path):
    async with WorkerCluster(tmp_path, prepare_scripted(tmp_path, MODEL), SERVE) as made:
        yield made


@pytest.mark.cluster
async def test_a_killed_prefill_worker_is_replaced_and_the_answer_is_whole(cluster):
    (first,) = await cluster.spawn("prefill")
    second, decode = await cluster.run("prefill"), await cluster.run("decode")
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
    await cluster.run("prefill")
    assert not list(cluster.segments.glob(f"*{first.incarnation}*"))


@pytest.mark.cluster
async def test_a_prefill_worker_killed_after_its_first_token_is_not_noticed_by_the_client(tmp_path, monkeypatch):
    slow = ScriptedConfig(mean_length=1000, step_delay_ms=40.0)
    forward = RequestLedger.forward_first

    def forward_and_kill(self, request, first):
        # The decode worker is in this process: the source dies before it can be asked whether its lease held.
        forward(self, request, first)
        prefill.signal(signal.SIGKILL)

    monkeypatch.setattr(RequestLedger, "forward_first", forward_and_kill)
    async with WorkerCluster(tmp_path, prepare_scripted(tmp_path, slow), SERVE) as cluster:
        (prefill,) = await cluster.spawn("prefill", sets=["engine.chunk_tokens=64"])
        decode = await cluster.run("decode")
        gateway = await cluster.gateway(decode)
        short, long = PROMPT[:30], PROMPT
        gateway.submit(1, ask(short, 3), prefill.target)
        gateway.submit(2, ask(long, 3, request_id="req-2"), prefill.target)
        end = await gateway.ended(1)
        assert isinstance(end, Finished)
        assert gateway.tokens[1] == scripted_reply(slow, short, 3)
        assert end.recomputed_tokens == len(short) + 1
        assert gateway.of(1, NeedPrefill) == []
        await gateway.until(lambda: gateway.of(2, NeedPrefill))
        gateway.send(Place(handle=2, prefill=None))
        await gateway.ended(2)
        assert gateway.tokens[2] == scripted_reply(slow, long, 3)
        found = await cluster.settled(decode)
        assert found["worker_recovered_here_total"] == 1
        for left in cluster.segments.iterdir():
            left.unlink()


@pytest.mark.cluster
async def test_a_stopped_prefill_worker_is_given_up_in_time(cluster):
    sets = ["transfer.lease_ttl_s=0.6", "transfer.progress_timeout_s=0.5", "transfer.prepare_timeout_s=0.5"]
    (prefill,) = await cluster.spawn("prefill", sets=sets)
    decode = await cluster.run("decode", sets)
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
    (decode,) = await cluster.spawn("decode")
    prefill = await cluster.run("prefill")
    gateway = await cluster.gateway(decode)
    for handle in range(4):
        gateway.submit(handle, ask(PROMPT[handle:], request_id=f"req-{handle}"), prefill.target)
    await cluster.busy(prefill, "transfer_leases")
    decode.signal(signal.SIGKILL)
    await decode.exit_code()
    await cluster.settled(prefill)
    successor = await cluster.run("decode")
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


def plain_lines(output):
    return [line for line in output.splitlines() if line and not line.startswith("{")]


@pytest.mark.cluster
async def test_what_a_machine_lacks_is_one_plain_sentence_and_exit_code_3(cluster):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        faults = {
            "shared memory": ("prefill", ["engine.num_pages=2000000000"]),
            f":{port}": ("decode", [f"worker.port={port}"]),
            # Everything is loaded then: it ends while it warms up, and no gateway ever hears of it.
            "mori": ("prefill", ['transfer.transports=["mori"]']),
        }
        runs = [run_to_exit(cluster.arguments(kind, sets)) for kind, sets in faults.values()]
        done = await asyncio.gather(*runs)
    for says, (code, errors) in zip(faults, done, strict=True):
        assert (code, len(plain_lines(errors))) == (3, 1), errors
        assert says in plain_lines(errors)[0]
    assert '"state: warming"' in done[-1][1]
    assert cluster.membership.registrations == []


async def run_to_exit(arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


@pytest.fixture
def quiet_logging():
    """The services configure the root logger; put it back."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


FAULTS = [
    ("prefill", "engine.page_tokns=8", "page_tokns"),
    ("prefill", "worker.port=many", "port"),
    ("decode", "prefill.mode=sometimes", "mode"),
    ("prefill", "model.path=/nowhere", "/nowhere"),
    ("decode", "engine.chunk_tokens=1", "chunk_tokens"),
    ("prefill", "worker.secret_file=/nowhere", "secret"),
    ("prefill", 'transfer.transports=["pigeon"]', "pigeon"),
    ("decode", 'transfer.transports=["pigeon"]', "pigeon"),
    ("decode", "worker.log_level=LOUD", "LOUD"),
]


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize(("kind", "setting", "says"), FAULTS, ids=[f"{kind} {says}" for kind, _, says in FAULTS])
def test_what_is_configured_wrongly_is_one_plain_sentence_and_exit_code_3(
    tmp_path, monkeypatch, capsys, kind, setting, says
):
    assert start_in_vain(tmp_path, monkeypatch, kind, setting) == 3
    lines = plain_lines(capsys.readouterr().err)
    assert len(lines) == 1, lines
    assert says in lines[0]


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize(("name", "cut"), [("tokenizer.json", 20), ("config.json", 5)])
def test_a_corrupted_model_file_is_one_plain_sentence_and_exit_code_3(tmp_path, monkeypatch, capsys, name, cut):
    file = prepare_scripted(tmp_path, MODEL) / name
    file.write_bytes(file.read_bytes()[:-cut])
    assert start_in_vain(tmp_path, monkeypatch, "prefill") == 3
    lines = plain_lines(capsys.readouterr().err)
    assert len(lines) == 1, lines
    assert name in lines[0]


def start_in_vain(directory, monkeypatch, kind, *sets):
    """Run a service's main in this process; returns its exit code."""
    (directory / "secret").write_bytes(b"a secret for tests only")
    cluster = WorkerCluster(directory, prepare_scripted(directory, MODEL))
    monkeypatch.setattr(sys, "argv", cluster.arguments(kind, sets)[1:])
    code = {"prefill": prefill_main, "decode": decode_main}[kind]()
    # Nothing may be left: an empty directory is all that can be removed like this.
    cluster.segments.rmdir()
    return code
