"""DeepSeek-V4.1 (tiny) between real workers: replay floors travel to the gateway and back into other workers.

In the deterministic mode equal floors give equal texts, wherever and however often the prompt is computed.
"""

import asyncio

import pytest

from core.request import StopRules, with_floors
from core.stream import Finished, Started
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from engine.models.builtin import prepare_builtin
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from tests.fakes.worker_cluster import WorkerCluster, ask

SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
SETS = ("engine.chunk_tokens=64", "engine.audit_every_steps=1", 'transfer.transports=["shm"]', "transfer.digests=true")
FIRST = tuple(32 + token * 7 % 80 for token in range(33))
OUTPUTS = 15


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return prepare_builtin("v41-tiny", tmp_path_factory.mktemp("model"))


def question(tokens, *, said=(), **changes):
    stop = StopRules(max_tokens=OUTPUTS, ignore_eos=True)
    return ask((*tokens, *said), stop=stop, num_prompt_tokens=len(tokens), **changes)


async def test_a_conversation_goes_on_alike_on_any_worker_with_the_floors_of_its_turn(tmp_path, checkpoint):
    async with WorkerCluster(tmp_path, checkpoint, SERVE) as cluster:
        prefill, decode, other = await asyncio.gather(
            cluster.run("prefill", SETS), cluster.run("decode", SETS), cluster.run("decode", SETS)
        )
        here, there = await cluster.gateway(decode), await cluster.gateway(other)
        answer, _ = await here.answer(1, question(FIRST), prefill.target)
        assert here.of(1, Started)[0].floors.hits == ()
        # The decode worker holds the answer too, the prefill worker only the prompt: its shorter hit decides.
        turn = (*FIRST, *answer, *FIRST[5:20])
        said, end = await here.answer(2, question(turn, request_id="req-2"), prefill.target)
        assert isinstance(end, Finished)
        first, landed = here.of(2, Started)
        assert first.floors == landed.floors
        assert first.floors.hits == (32,)
        assert first.num_cached_tokens == 32
        # On a worker that holds nothing, alone.
        alone, _ = await there.answer(3, with_floors(question(turn, request_id="req-3"), first.floors))
        assert alone == said
        assert there.of(3, Started)[0].floors == first.floors
        # Resumed in the middle on another pair.
        rest = with_floors(question(turn, said=said[:6], request_id="req-4", attempt=1), first.floors)
        there.base = lambda handle: 6 if handle == 4 else 0
        resumed, _ = await there.answer(4, rest, prefill.target)
        assert said[:6] + resumed == said
        for worker in (prefill, decode, other):
            await cluster.settled(worker)
