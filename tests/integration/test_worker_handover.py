"""A real prefill worker and a real decode worker in this process, over real gRPC and real transports.

The `scripted` model reads its whole context back from KV for every token, so a wrong, missing or foreign page changes
the text; `scripted_reply` is the truth.
"""

import asyncio

import pytest

from core.errors import NoCapacity, WorkerLost
from core.handover import TokenLogprobs
from core.ids import Incarnation
from core.request import SamplingParams, StopRules
from core.stream import AbortRequest, Finished, NeedPrefill, Place, Started
from decode_worker.app import serve as serve_decode
from decode_worker.config import DecodeWorkerConfig
from decode_worker.metrics import DECODE_METRICS
from engine.models.builtin import prepare_builtin, prepare_scripted
from engine.models.script import ScriptedConfig, scripted_reply
from kv_transfer.factory import NATIVE
from prefill_worker.app import serve as serve_prefill
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.metrics import PREFILL_METRICS
from tests.fakes.worker_cluster import LEFT_OVERS, RpcGateway, WorkerCluster, ask

MODEL = ScriptedConfig(mean_length=40, step_delay_ms=1.0)
SERVE = {"prefill": (PrefillWorkerConfig, serve_prefill), "decode": (DecodeWorkerConfig, serve_decode)}
PROMPT = tuple(b"the quick brown fox jumps over the lazy dog, and then some more of the same to fill pages")


def truth(prompt, max_tokens=24):
    return scripted_reply(MODEL, prompt, max_tokens)


@pytest.fixture
async def cluster(tmp_path):
    async with WorkerCluster(tmp_path, prepare_scripted(tmp_path, MODEL), SERVE) as made:
        yield made


async def pair(cluster, *sets):
    prefill, decode = await asyncio.gather(cluster.run("prefill", sets), cluster.run("decode", sets))
    return prefill, decode, await cluster.gateway(decode)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_handed_over_request_says_what_a_single_worker_says_and_what_is_true(cluster, transport):
    prefill, decode, gateway = await pair(cluster, f'transfer.transports=["{transport}"]', "engine.audit_every_steps=1")
    remote, end = await gateway.answer(1, ask(PROMPT), prefill.target)
    local, _ = await gateway.answer(2, ask(PROMPT[::-1]))
    assert remote == truth(PROMPT)
    assert local == truth(PROMPT[::-1])
    assert isinstance(end, Finished)
    assert (end.num_output_tokens, end.recomputed_tokens) == (len(remote), 0)
    first, landed = gateway.of(1, Started)
    assert (first.prefill_worker, first.bytes_pulled) == (prefill.id, 0)
    here, there = await cluster.settled(decode), await cluster.settled(prefill)
    assert landed.bytes_pulled == here["transfer_bytes_pulled"] == there["transfer_bytes_handed_over"] > 0
    assert here["engine_recomputed_tokens"] == 0


async def test_many_prompts_at_once_are_all_right_and_leave_only_free_and_cached_pages(cluster):
    prefill, decode, gateway = await pair(cluster, "engine.audit_every_steps=1")
    prompts = [(*PROMPT[: 5 + 3 * n], 97 + n) for n in range(24)]
    asked = [
        gateway.answer(n, ask(p, request_id=f"req-{n}"), prefill.target if n % 3 else None)
        for n, p in enumerate(prompts)
    ]
    answers = await asyncio.gather(*asked)
    assert [tokens for tokens, _ in answers] == [truth(p) for p in prompts]
    assert all(isinstance(end, Finished) for _, end in answers)
    for worker in (prefill, decode):
        await cluster.settled(worker)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["tiny-llama-f64", "tiny-window-f64"])
async def test_a_model_with_weights_says_the_same_handed_over_and_local(tmp_path, name, transport):
    sets = (f'transfer.transports=["{transport}"]', "transfer.digests=true")
    async with WorkerCluster(tmp_path, prepare_builtin(name, tmp_path), SERVE) as cluster:
        prefill, decode, gateway = await pair(cluster, *sets)
        prompt = tuple(token % 250 for token in range(7, 77))
        for n, sampling in enumerate((SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3))):
            options = {"sampling": sampling, "stop": StopRules(max_tokens=20, ignore_eos=True)}
            local, _ = await gateway.answer(10 * n, ask(prompt, **options))
            remote, _ = await gateway.answer(10 * n + 1, ask(prompt, **options), prefill.target)
            assert remote == local
            assert len(remote) == 20
        await cluster.settled(decode)
        await cluster.settled(prefill)


async def test_a_prefill_worker_that_breaks_down_at_any_moment_costs_no_answer(cluster):
    """Its links are cut at once, before FINAL (the gateway names another) or after it (computed here, unseen)."""
    decode, second = await cluster.run("decode"), await cluster.run("prefill")
    gateway = await cluster.gateway(decode)
    for number in range(8):
        first = await cluster.run("prefill")
        await breakdown(gateway, first, second, number)
    for worker in (decode, second):
        await cluster.settled(worker)


async def breakdown(gateway, first, second, number):
    prompts = {10 * number + n: PROMPT[n + number :] for n in range(4)}
    for handle, prompt in prompts.items():
        gateway.submit(handle, ask(prompt, request_id=f"req-{handle}"), first.target)
    # In the first rounds no request has its first token at that moment, in the last ones all have it.
    await gateway.until(lambda: sum(handle in gateway.tokens for handle in prompts) >= min(number, 4))
    first.departure.crash(RuntimeError("planted"))
    await first.task
    placed = set()
    while any(gateway.terminal(handle) is None for handle in prompts):
        for handle in prompts:
            if gateway.of(handle, NeedPrefill) and handle not in placed:
                placed.add(handle)
                gateway.send(Place(handle=handle, prefill=second.target if handle % 2 else None))
        await asyncio.sleep(0.01)
    for handle, prompt in prompts.items():
        assert isinstance(gateway.terminal(handle), Finished), gateway.terminal(handle)
        assert gateway.tokens[handle] == truth(prompt)


async def test_a_gateway_gets_at_most_one_frame_per_engine_step_for_64_requests(cluster):
    decode = await cluster.run("decode", ["engine.num_rows=64", "engine.num_pages=2048"])
    gateway = await cluster.gateway(decode)
    for handle in range(64):
        gateway.submit(handle, ask(PROMPT[:8] + (handle,), 40, request_id=f"req-{handle}"))
    for handle in range(64):
        await gateway.ended(handle)
    statistics = await cluster.settled(decode)
    frames = sum(bool(frame.counts) for frame in gateway.frames)
    tokens = sum(len(tokens) for tokens in gateway.tokens.values())
    assert frames <= statistics["engine_steps"]
    assert tokens > 8 * frames


async def test_every_exported_metric_shows_a_number_that_the_worker_counts(cluster):
    prefill, decode, gateway = await pair(cluster)
    await gateway.answer(1, ask(PROMPT), prefill.target)
    for worker, table in ((prefill, PREFILL_METRICS), (decode, DECODE_METRICS)):
        statistics = await cluster.settled(worker)
        # A count by name appears with its first occurrence.
        never = {"worker_need_prefill_total", "worker_recovered_here_total", "worker_aborted_total"}
        # What a native engine counts, once it is open.
        never |= {row.statistic for row in table if row.label and row.label[1] in NATIVE and "bytes" not in row.metric}
        assert {row.statistic for row in table} - set(statistics) <= never
    assert {name for name in LEFT_OVERS if name not in statistics} == {"transfer_leases"}


async def test_a_prefix_that_the_decode_worker_holds_is_not_pulled_again(cluster):
    prefill, decode, gateway = await pair(cluster)
    await gateway.answer(1, ask(PROMPT), prefill.target)
    again, _ = await gateway.answer(2, ask(PROMPT, request_id="req-2"), prefill.target)
    assert again == truth(PROMPT)
    whole, rest = (gateway.of(handle, Started)[-1].bytes_pulled for handle in (1, 2))
    assert 0 < rest < whole / 4
    # The prefill worker found its own prefix, and that is what counts as cached.
    assert gateway.of(2, Started)[0].num_cached_tokens >= len(PROMPT) // 8 * 8 - 8
    await cluster.settled(decode)


async def test_seeded_sampling_is_the_same_handed_over_and_local(cluster):
    prefill, _, gateway = await pair(cluster)
    sampling = SamplingParams(temperature=30.0, seed=7, num_logprobs=2)
    remote, _ = await gateway.answer(1, ask(PROMPT, sampling=sampling), prefill.target)
    local, _ = await gateway.answer(2, ask(PROMPT, sampling=sampling))
    assert remote == local
    assert remote != truth(PROMPT)
    assert [item.token for item in gateway.logprobs[1]] == remote
    assert gateway.logprobs[1] == gateway.logprobs[2]
    assert all(isinstance(item, TokenLogprobs) and len(item.top) == 2 for item in gateway.logprobs[1])


async def test_a_request_that_its_first_token_ends_is_answered_without_decoding(cluster):
    prefill, decode, gateway = await pair(cluster)
    tokens, end = await gateway.answer(1, ask(PROMPT, max_tokens=1), prefill.target)
    assert tokens == truth(PROMPT, 1)
    assert (end.reason, end.num_output_tokens) == ("length", 1)
    assert (await cluster.settled(decode))["engine_decode_tokens"] == 0


async def test_a_resumed_request_continues_exactly(cluster):
    prefill, decode, gateway = await pair(cluster)
    whole = truth(PROMPT, 30)
    resumed = ask(PROMPT + tuple(whole[:9]), 30, attempt=1, num_prompt_tokens=len(PROMPT), num_cached_tokens=3)
    gateway.base = lambda handle: 9
    for handle, target in ((1, prefill.target), (2, None)):
        tokens, end = await gateway.answer(handle, resumed, target)
        assert tokens == whole[9:]
        assert end.num_output_tokens == len(whole)
        assert gateway.of(handle, Started)[0].num_cached_tokens == 3


async def test_auto_mode_computes_short_prompts_here_and_hands_long_ones_over(cluster):
    prefill, decode, gateway = await pair(cluster)
    auto = await cluster.run("decode", ["prefill.mode=auto", "prefill.auto_threshold_tokens=16"])
    gateway = await cluster.gateway(auto)
    for handle, prompt in ((1, PROMPT[:16]), (2, PROMPT), (3, PROMPT)):
        tokens, _ = await gateway.answer(handle, ask(prompt, request_id=f"req-{handle}"), prefill.target)
        assert tokens == truth(prompt)
    assert [bool(gateway.of(handle, Started)[0].prefill_worker) for handle in (1, 2, 3)] == [False, True, False]
    await cluster.settled(auto)


async def test_aborts_at_any_moment_leave_nothing_behind(cluster):
    prefill, decode, gateway = await pair(cluster, "engine.audit_every_steps=1", "engine.chunk_tokens=16")
    for handle in range(40):
        prompt = (97 + handle % 26, *PROMPT)
        gateway.submit(handle, ask(prompt, 200, request_id=f"req-{handle}"), prefill.target if handle % 4 else None)
        await asyncio.sleep(0.003)
        gateway.send(AbortRequest(handle=handle // 2))
    for handle in range(40):
        gateway.send(AbortRequest(handle=handle))
    for worker in (prefill, decode):
        await cluster.settled(worker)
    tokens, _ = await gateway.answer(99, ask(PROMPT, request_id="req-99"), prefill.target)
    assert tokens == truth(PROMPT)


async def test_a_stream_that_breaks_again_and_again_loses_and_repeats_nothing(cluster):
    prefill, decode, gateway = await pair(cluster)
    prompts = {handle: PROMPT[handle:] for handle in range(8)}
    for handle, prompt in prompts.items():
        gateway.submit(handle, ask(prompt, 60, request_id=f"req-{handle}"), prefill.target if handle % 2 else None)
    await gateway.until(lambda: len(gateway.tokens) == len(prompts))
    for _ in range(5):
        await gateway.cut()
        await gateway.open(resume_after=gateway.last)
    for handle, prompt in prompts.items():
        await gateway.ended(handle)
        assert gateway.tokens[handle] == truth(prompt, 60)


async def test_a_gateway_that_does_not_come_back_loses_its_requests(cluster):
    prefill, decode = await cluster.run("prefill"), await cluster.run("decode", ["stream.replay_s=0.2"])
    gateway = await cluster.gateway(decode)
    gateway.submit(1, ask(PROMPT, 5000, stop=StopRules(max_tokens=1900, ignore_eos=True)), prefill.target)
    await gateway.until(lambda: len(gateway.tokens.get(1, ())) > 3)
    await gateway.cut()
    for worker in (prefill, decode):
        await cluster.settled(worker)
    with pytest.raises(WorkerLost):
        await gateway.open(resume_after=gateway.last)


async def test_another_incarnation_is_told_that_it_is_stale(cluster):
    decode = await cluster.run("decode")
    decode.incarnation = Incarnation("e" * 32)
    with pytest.raises(WorkerLost, match="restarted"):
        await RpcGateway(decode, cluster.proof, "a" * 32).open()


async def test_a_full_queue_is_refused_with_a_time_to_come_back(cluster):
    decode = await cluster.run("decode", ["engine.num_rows=1", "engine.max_waiting=1"])
    gateway = await cluster.gateway(decode)
    for handle in range(12):
        gateway.submit(handle, ask(PROMPT[handle:], 40, request_id=f"req-{handle}"))
    ends = [await gateway.ended(handle) for handle in range(12)]
    refused = [end for end in ends if not isinstance(end, Finished)]
    assert refused
    assert all(end.code == NoCapacity.code and end.retry_after_s > 0 for end in refused)
    assert isinstance(ends[0], Finished)


async def test_a_gateway_knows_what_a_worker_is_how_busy_it_is_and_what_it_caches(cluster):
    prefill, decode, gateway = await pair(cluster)
    await gateway.answer(1, ask(PROMPT), prefill.target)
    registered = {r.worker_id: r for r in cluster.membership.registrations}
    assert set(registered) == {prefill.id, decode.id}
    assert registered[prefill.id].fingerprint == registered[decode.id].fingerprint
    assert registered[prefill.id].namespace == registered[decode.id].namespace
    assert (registered[decode.id].model, registered[decode.id].page_tokens) == ("m", 8)
    assert registered[decode.id].transports
    await cluster.membership.until("events", 2)
    for worker in (prefill, decode):
        snapshot = await cluster.index.snapshot(worker.address)
        assert snapshot.incarnation == worker.incarnation
        assert len(snapshot.hashes) >= len(PROMPT) // 8
    loads = cluster.membership.loads
    assert all(load.pages_total == 255 for load in loads)


async def test_a_drained_worker_finishes_what_runs_and_refuses_what_is_new(cluster):
    prefill, decode, gateway = await pair(cluster)
    gateway.submit(1, ask(PROMPT, 120, stop=StopRules(max_tokens=120, ignore_eos=True)), prefill.target)
    await gateway.until(lambda: len(gateway.tokens.get(1, ())) > 3)
    await cluster.admin.drain(decode.address, 20.0)
    await cluster.membership.until("left: draining")
    await cluster.busy(decode, "worker_draining")
    _, refusal = await gateway.answer(2, ask(PROMPT))
    assert refusal.code == "draining"
    assert isinstance(await gateway.ended(1), Finished)
    assert gateway.tokens[1] == scripted_reply(MODEL, PROMPT, 120, ignore_eos=True)
    await asyncio.wait_for(decode.task, 30)


async def test_a_drain_that_runs_out_of_budget_hands_requests_back(cluster):
    prefill, decode, gateway = await pair(cluster)
    gateway.submit(1, ask(PROMPT, stop=StopRules(max_tokens=1900, ignore_eos=True)), prefill.target)
    await gateway.until(lambda: len(gateway.tokens.get(1, ())) > 3)
    await cluster.admin.drain(decode.address, 0.3)
    assert (await gateway.ended(1)).code == "draining"
    await asyncio.wait_for(decode.task, 30)
    await cluster.settled(prefill)


async def test_the_checks_of_these_tests_can_fail(cluster):
    """Negative controls: held pages, a repeated frame and a foreign prompt are all noticed."""
    prefill, decode, gateway = await pair(cluster)
    gateway.submit(1, ask(PROMPT, stop=StopRules(max_tokens=1900, ignore_eos=True)), prefill.target)
    await gateway.until(lambda: len(gateway.tokens.get(1, ())) > 3)
    with pytest.raises(AssertionError, match="engine_rows_used"):
        await cluster.settled(decode, timeout_s=0)
    gateway.acks = False
    await gateway.until(lambda: len(gateway.tokens[1]) > 30)
    await gateway.cut()
    # A gateway that forgot its last frame sees it again.
    await gateway.open(resume_after=gateway.last - 1)
    with pytest.raises(AssertionError, match="a frame was lost or repeated"):
        await gateway.connection
    other = await cluster.gateway(decode, "b" * 32)
    tokens, _ = await other.answer(1, ask((*PROMPT[:-1], 33)), prefill.target)
    assert tokens != truth(PROMPT)
