"""Over every transport: tokens and log probabilities of a hand-over are those of one worker that computes all itself.

Real workers in this process over real gRPC and the real transport (MORI's is the fake library). In float64 and in the
deterministic mode equality is exact. The single worker is another process-wide engine that never meets the transport.
"""

import asyncio
import functools
import sys
from types import ModuleType

import pytest

from core.request import SamplingParams, StopRules
from core.stream import AbortRequest, Finished, Started
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from engine.models.builtin import prepare_builtin
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from tests.fakes.fake_mori import FakeMori
from tests.fakes.kv_ends import require
from tests.fakes.worker_cluster import WorkerCluster, ask

SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
TRANSPORTS = {
    "shm": (),
    "tcp": (),
    "nixl": (),
    "nixl-tcp": ('transfer.native_lane="tcp"',),
    "mooncake": (),
    "mori": (),
}
CHECKED = ("transfer.digests=true", "engine.audit_every_steps=1", "transfer.landing_ring_bytes=8388608")
ALONE = 'prefill.mode="local"'
GREEDY = SamplingParams(temperature=0.0, num_logprobs=2)
OUTPUTS = 12
PAGE = 8


def prompt_of(length, start=7):
    return tuple((start + 5 * token) % 250 for token in range(length))


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    require(request.param)
    if request.param == "mori":
        monkeypatch.setitem(sys.modules, "mori", ModuleType("mori"))
        monkeypatch.setitem(sys.modules, "mori.io", FakeMori())
    name = request.param.partition("-")[0]
    return (f'transfer.transports=["{name}"]', *TRANSPORTS[request.param])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Checkpoints by name, each prepared once."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: prepare_builtin(name, folder))


class Trio:
    """A prefill and a decode worker over one transport, and a worker that is alone."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.handle = 0

    async def start(self, sets, decode_sets=(), alone_sets=()):
        run = self.cluster.run
        self.prefill, self.decode, self.alone = await asyncio.gather(
            run("prefill", (*CHECKED, *sets)),
            run("decode", (*CHECKED, *sets, *decode_sets)),
            run("decode", (ALONE, "engine.audit_every_steps=1", *alone_sets)),
        )
        self.here, self.single = await self.cluster.gateway(self.decode), await self.cluster.gateway(self.alone)
        return self

    def request(self, prompt, outputs=OUTPUTS, sampling=GREEDY, **stop):
        self.handle += 1
        rules = StopRules(max_tokens=outputs, **({"ignore_eos": True} | stop))
        return self.handle, ask(prompt, request_id=f"req-{self.handle}", sampling=sampling, stop=rules)

    async def answer(self, gateway, prompt, target=None, **options):
        handle, request = self.request(prompt, **options)
        tokens, end = await gateway.answer(handle, request, target, timeout_s=60)
        assert isinstance(end, Finished), end
        return handle, tokens, gateway.logprobs.get(handle, []), end.reason

    async def equal(self, prompt, **options):
        """Both ways give the same; returns (handle of the hand-over, tokens)."""
        _, *expected = await self.answer(self.single, prompt, **options)
        handle, *found = await self.answer(self.here, prompt, self.prefill.target, **options)
        assert found == expected
        assert self.here.of(handle, Started)[0].prefill_worker, "computed here: nothing was shown"
        return handle, found[0]

    async def settled(self):
        for worker in (self.prefill, self.decode, self.alone):
            await self.cluster.settled(worker)


async def test_a_model_with_pages_and_rows_says_the_same_over_every_transport(tmp_path, model, transport):
    async with WorkerCluster(tmp_path, model("tiny-window-f64"), SERVE) as cluster:
        trio = await Trio(cluster).start(transport)
        # Lengths around page and chunk borders; each prompt is new, so nothing is cached.
        for number, length in enumerate((1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 70)):
            await trio.equal(prompt_of(length, 11 * number))
        hot = SamplingParams(temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.3, num_logprobs=0)
        await trio.equal(prompt_of(50, 3), sampling=hot)
        # n > 1: samples of one prompt, together.
        samples = [SamplingParams(temperature=0.9, seed=9, sample_index=index, num_logprobs=0) for index in range(3)]
        texts = await asyncio.gather(*(trio.equal(prompt_of(45, 2), sampling=sampling) for sampling in samples))
        assert len({tuple(tokens) for _, tokens in texts}) > 1
        # Ends at its first token: by count, and by a stop id.
        _, (first, *_) = await trio.equal(prompt_of(33, 4), outputs=1)
        await trio.equal(prompt_of(33, 4), stop_token_ids=(first,))
        await trio.settled()


async def test_prefix_hits_at_either_side_both_and_with_a_partial_page_change_nothing(tmp_path, model, transport):
    async with WorkerCluster(tmp_path, model("tiny-llama-f64"), SERVE) as cluster:
        trio = await Trio(cluster).start(transport)
        base = prompt_of(6 * PAGE + 3)
        handle, answer = await trio.equal(base)  # afterwards both sides hold its whole pages
        assert trio.here.of(handle, Started)[0].num_cached_tokens == 0
        before = (await cluster.settled(trio.decode))["transfer_bytes_pulled"]
        await trio.equal((*base, 1, 2, 3))  # both; the partial page comes again
        moved = (await cluster.settled(trio.decode))["transfer_bytes_pulled"] - before
        assert 0 < moved < before, "what both hold was not moved again"
        await trio.equal((*base, *answer, 4, 5, 6))  # the answer's pages lie at D only
        await trio.equal((*base[: 3 * PAGE], *prompt_of(20, 99)))  # a shorter common beginning
        other = await cluster.run("decode", (*CHECKED, *transport))
        fresh = await cluster.gateway(other)
        _, *expected = await trio.answer(trio.single, (*base, 8, 9))
        found = await trio.answer(fresh, (*base, 8, 9), trio.prefill.target)  # P only
        assert list(found[1:]) == expected
        await trio.settled()
        await cluster.settled(other)


async def test_aborts_in_every_state_and_preemption_leave_the_others_as_they_are(tmp_path, model, transport):
    tight = ("engine.num_pages=40", "engine.horizon_tokens=0", "engine.finish_reserve_pages=0")
    async with WorkerCluster(tmp_path, model("tiny-llama-f64"), SERVE) as cluster:
        trio = await Trio(cluster).start(transport, decode_sets=tight)
        prompts = [prompt_of(40 + number, number) for number in range(6)]
        expected = [(await trio.answer(trio.single, prompt, outputs=40))[1] for prompt in prompts]
        asked = [asyncio.create_task(trio.answer(trio.here, p, trio.prefill.target, outputs=40)) for p in prompts]
        for number in range(12):
            handle, request = trio.request(prompt_of(30 + number, 100 + number), outputs=40)
            trio.here.submit(handle, request, trio.prefill.target)
            await asyncio.sleep(0.004 * number)
            trio.here.send(AbortRequest(handle=handle))
        assert [(await task)[1] for task in asked] == expected
        statistics = await cluster.settled(trio.decode)
        assert statistics["engine_retractions"] > 0, "the pool was not small enough to show anything"
        await trio.settled()


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl", "mooncake"], indirect=True)
async def test_drafts_at_the_decode_worker_change_nothing(tmp_path, model, transport):
    """V4.1 in miniature: pages, window rings, compressor rows and draft context travel; the single worker drafts nothing."""
    sets, plain = ("engine.chunk_tokens=64",), ("engine.chunk_tokens=64", 'engine.speculation.mode="off"')
    async with WorkerCluster(tmp_path, model("v41-tiny"), SERVE) as cluster:
        trio = await Trio(cluster).start((*transport, *sets), alone_sets=plain)
        prompt = tuple(32 + token * 7 % 80 for token in range(37))
        await trio.equal(prompt, outputs=8, sampling=SamplingParams(temperature=0.0))
        statistics = await cluster.settled(trio.decode)
        assert statistics["engine_drafts_verified"] > 0, "nothing was drafted"
        await trio.settled()
