"""Public reports about other gateways that concern resilience and operation, each as a test of ours; the names say which."""

import asyncio
import socket
from contextlib import aclosing

import pytest

from core.errors import BadRequest, NoCapacity, NoWorker, TandemError, WorkerLost
from core.ids import Incarnation
from gateway.admission import Limits
from gateway.attempt import RetryRules
from gateway.http.protocol import GuardedProtocol
from gateway.http.server import HttpServer
from gateway.metrics import total_of
from gateway.routing.job import RoutingRules
from tests.fakes.sim_decode import LocalStream, SimDecode, sim_answer
from tests.fakes.sim_gateway import collect, prompt, sim_gateway

NOTHING = {"request": 0, "queued": 0, "permit": 0, "attempt": 0}


def decode(name="d1", plan=(), **options):
    return SimDecode(f"{name}-a", plan=lambda _submit: plan, **options)


def add(gateway, name="d1", plan=(), **options):
    worker = decode(name, plan, **options)
    gateway.add_decode(name, worker, incarnation=Incarnation(worker.incarnation))
    return worker


async def settled(reached):
    async with asyncio.timeout(30):
        while True:
            if reached():
                return
            await asyncio.sleep(0.002)


async def test_sglang_omni_931_a_close_that_fails_still_gives_everything_back(monkeypatch):
    post = LocalStream.post

    def failing(self, frame):
        if type(frame).__name__ == "AbortRequest":
            raise WorkerLost("the connection broke under the goodbye")
        post(self, frame)

    monkeypatch.setattr(LocalStream, "post", failing)
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        add(gateway, step_s=0.001)
        async with aclosing(gateway.orchestrator.generate(prompt(max_tokens=1000))) as deltas:
            await anext(deltas)
        assert gateway.leases.counts() == NOTHING
        assert gateway.own_work() == (0, 0)


@pytest.mark.parametrize("when", ["before a token", "after a token", "in the queue"])
async def test_dynamo_13691_14507_a_client_that_leaves_is_aborted_at_the_worker(when):
    async with sim_gateway(limits=Limits(max_in_flight=1)) as gateway:
        gateway.add_prefill("p1")
        worker = add(gateway, plan=[("wait", 10**6)] if when == "before a token" else (), step_s=0.001)
        running = asyncio.create_task(collect(gateway.orchestrator, prompt(max_tokens=3000)))
        await settled(lambda: worker.running == 1)
        if when == "after a token":
            await settled(lambda: worker.counts["tokens"] > 0)
        if when == "in the queue":
            waiting = asyncio.create_task(collect(gateway.orchestrator, prompt((5, 6))))
            await settled(lambda: gateway.admission.queued == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert gateway.admission.queued == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await settled(lambda: worker.running == 0)
        assert (worker.counts["aborts"], worker.counts["submits"]) == (1, 1)
        assert gateway.leases.counts() == NOTHING


async def test_tokenspeed_1427_smg_2463_a_burst_larger_than_the_window_only_waits():
    async with sim_gateway(limits=Limits(max_in_flight=4)) as gateway:
        gateway.add_prefill("p1")
        worker = add(gateway, step_s=0.001)
        asked = [prompt((number + 3, 9), max_tokens=6, timeout_s=30.0) for number in range(32)]
        answers = await asyncio.gather(*(collect(gateway.orchestrator, each) for each in asked))
        assert [tokens for tokens, *_ in answers] == [sim_answer(each.token_ids, 6) for each in asked]
        assert worker.counts["submits"] == 32


@pytest.mark.parametrize("fallback", [True, False])
async def test_llm_d_router_2521_an_empty_prefill_pool_is_a_policy_and_is_counted(fallback):
    async with sim_gateway(routing=RoutingRules(local_fallback=fallback)) as gateway:
        worker = decode()
        gateway.add_decode("d1", worker, incarnation=Incarnation(worker.incarnation), prefill_mode="remote")
        if fallback:
            tokens, *_ = await collect(gateway.orchestrator, prompt())
            assert tokens == sim_answer((11, 12, 13), 8)
            assert (worker.counts["local"], total_of(gateway.metrics.fallbacks)) == (1, 1)
        else:
            with pytest.raises(NoWorker):
                await collect(gateway.orchestrator, prompt())
            assert total_of(gateway.metrics.errors.labels("no_worker")) == 1


async def test_sglang_25811_a_hundred_client_errors_open_no_breaker():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = add(gateway, plan=[("error", "invalid_request")])
        for _ in range(100):
            with pytest.raises(BadRequest):
                await collect(gateway.orchestrator, prompt())
        assert worker.counts["submits"] == 100, "each was asked once, none was tried again"
        [member] = [member for member in gateway.directory if member.worker_id == "d1"]
        assert (member.breaker.failures, member.breaker.open_until) == (0, 0)


async def test_sglang_40168_32491_router_280_the_limit_bounds_streams_for_all_their_life():
    async with sim_gateway(limits=Limits(max_in_flight=2, max_queued=100)) as gateway:
        gateway.add_prefill("p1")
        worker = add(gateway, step_s=0.001)
        worst = 0
        tasks = [
            asyncio.create_task(collect(gateway.orchestrator, prompt((number + 3, 4), max_tokens=20, timeout_s=30.0)))
            for number in range(6)
        ]
        tasks[2].cancel()
        while not all(task.done() for task in tasks):
            worst = max(worst, worker.running)
            await asyncio.sleep(0)
        assert worst == 2
        assert gateway.admission.in_flight == 0


async def test_infera_82_a_worker_that_fails_at_once_is_not_asked_for_each_request():
    rules = RetryRules(pause_s=0.0005, longest_pause_s=0.001, budget_burst=1000.0)
    async with sim_gateway(retries=rules) as gateway:
        gateway.add_prefill("p1")
        bad = add(gateway, "d1", plan=[("error", "worker_lost")])
        good = add(gateway, "d2")
        for number in range(40):
            asked = prompt((number + 3, 8), timeout_s=20.0)
            assert (await collect(gateway.orchestrator, asked))[0] == sim_answer(asked.token_ids, 8)
        assert good.counts["submits"] == 40
        assert bad.counts["submits"] <= 4, "three failures open its breaker; half of all would be 20"


async def test_all_workers_failing_is_told_after_few_tries():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        workers = [add(gateway, f"d{number}", plan=[("error", "no_capacity")]) for number in range(3)]
        with pytest.raises(NoCapacity):
            await collect(gateway.orchestrator, prompt())
        assert sum(worker.counts["submits"] for worker in workers) <= RetryRules().max_failures


async def test_retries_of_what_live_workers_answered_stay_within_their_budget():
    rules = RetryRules(pause_s=0.0, longest_pause_s=0.0, start_wait_s=0.0, budget_share=0.1, budget_burst=5.0)
    async with sim_gateway(retries=rules) as gateway:
        gateway.add_prefill("p1")
        workers = [add(gateway, f"d{number}", plan=[("error", "no_capacity")]) for number in range(3)]
        for _ in range(100):
            with pytest.raises(TandemError):
                await collect(gateway.orchestrator, prompt())
        extra = sum(worker.counts["submits"] for worker in workers) - 100
        assert 5 <= extra <= 5 + 100 * 0.1 + 1


@pytest.mark.parametrize("first_token_s", [0.001, 60.0])
async def test_a_request_that_no_placement_can_serve_in_time_is_refused_before_it_costs_anything(first_token_s):
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = add(gateway)
        # 3,000 uncached tokens at the 10,000/s that these workers report are 0.3 s.
        asked = prompt(tuple(range(3, 303)) * 10, first_token_s=first_token_s)
        if first_token_s < 1:
            with pytest.raises(NoCapacity, match="later than this request wants it") as caught:
                await collect(gateway.orchestrator, asked)
            assert caught.value.retry_after_s > 0
            assert worker.counts["submits"] == 0
            assert gateway.leases.counts() == NOTHING
        else:
            assert (await collect(gateway.orchestrator, asked))[0] == sim_answer(asked.token_ids, 8)


async def test_tt_inference_2171_rtp_llm_1080_small_writes_are_not_held_back(monkeypatch):
    """Nagle's algorithm with delayed acknowledgements costs a stream's first token 40 ms."""
    seen = []
    made = GuardedProtocol.connection_made

    def connection_made(self, transport):
        made(self, transport)
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(GuardedProtocol, "connection_made", connection_made)

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})

    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await settled(lambda: seen)
    writer.close()
    await server.drain(0.5)
    assert seen == [1]
