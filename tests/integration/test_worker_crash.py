"""A worker whose engine breaks down ends at once, whatever is in flight, and its peer is left clean."""

import asyncio

import pytest

from core.errors import InvariantError
from core.request import StopRules
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from engine.engine import Engine
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from tests.fakes.worker_cluster import WorkerCluster, ask

MODEL = ScriptedConfig(mean_length=40, step_delay_ms=5.0)
SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
PROMPT = tuple(b"a prompt of several chunks, so that pages are on their way when the engine breaks down")


def plant(patch, threads):
    """Let the engine that runs on one of `threads` report a broken invariant in its next step."""
    process = Engine.process

    def broken(engine, plan, result):
        if engine in threads:
            raise InvariantError("planted")
        process(engine, plan, result)

    patch.setattr(Engine, "process", broken)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_crash_with_hand_overs_in_flight_ends_the_worker_and_frees_its_peer(tmp_path, monkeypatch, kind):
    engines = []
    create = Engine.__init__

    def remember(self, **arguments):
        create(self, **arguments)
        engines.append(self)

    monkeypatch.setattr(Engine, "__init__", remember)
    async with WorkerCluster(tmp_path, prepare_scripted(tmp_path, MODEL), SERVE) as cluster:
        workers = {"prefill": await cluster.run("prefill", ["engine.chunk_tokens=16"])}
        workers["decode"] = await cluster.run("decode")
        gateway = await cluster.gateway(workers["decode"])
        long = StopRules(max_tokens=500, ignore_eos=True)
        for handle in range(8):
            prompt = (*PROMPT, handle)
            gateway.submit(handle, ask(prompt, stop=long, request_id=f"req-{handle}"), workers["prefill"].target)
        await gateway.until(lambda: gateway.tokens)
        plant(monkeypatch, [engines[list(workers).index(kind)]])
        victim = workers.pop(kind)
        async with asyncio.timeout(30):
            await victim.task
        assert "planted" in str(victim.departure.error)
        (peer,) = workers.values()
        await gateway.cut()
        await cluster.settled(peer)
