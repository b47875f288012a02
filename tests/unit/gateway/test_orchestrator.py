import asyncio
from contextlib import aclosing

import pytest

from core.errors import BadRequest, DeadlineExceeded, NeverFits, NoCapacity, NoWorker, UnknownModel, WorkerLost
from core.hashing import Namespace
from core.request import FinishReason, Floors, SamplingParams
from core.worker import Role
from gateway.admission import Limits
from gateway.attempt import RetryRules
from tests.fakes.cluster import registration
from tests.fakes.sim_decode import SimDecode, sim_answer
from tests.fakes.sim_gateway import collect, prompt, sim_gateway

ASKED = prompt()
ANSWER = sim_answer(ASKED.token_ids, 8)


def planned(name, *actions, first=None, **settings):
    """A worker that treats its first request (or all) by a plan, others plainly."""
    seen = []

    def plan(submit):
        seen.append(submit)
        return actions if first is None or len(seen) <= first else ()

    worker = SimDecode(f"{name}-a", plan=plan, **settings)
    worker.seen = seen
    return worker


async def test_a_sample_streams_its_tokens_and_ends_once():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1")
        tokens, finish, cached, _ = await collect(gateway.orchestrator, ASKED)
        assert (tokens, finish, cached) == (ANSWER, FinishReason.LENGTH, 5)
        assert gateway.own_work() == (0, 0)
        assert gateway.admission.in_flight == 0


async def test_log_probabilities_stay_aligned_with_tokens():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("repeat", 2), first=1))
        asked = prompt(sampling=SamplingParams(temperature=0.0, num_logprobs=0))
        tokens, _, _, logprobs = await collect(gateway.orchestrator, asked)
        assert [item.token for item in logprobs] == tokens == ANSWER


async def test_a_worker_that_dies_mid_stream_is_resumed_elsewhere_without_repeats():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("die",)))
        other = gateway.add_decode("d2", planned("d2", ("tokens", 3), ("die",), first=0))
        for _ in range(4):
            tokens, finish, _, _ = await collect(gateway.orchestrator, ASKED)
            assert (tokens, finish) == (ANSWER, FinishReason.LENGTH)
        resumed = [submit.request for submit in other.seen if submit.request.attempt > 0]
        assert len(resumed) == 1
        assert resumed[0].token_ids == (*ASKED.token_ids, *ANSWER[:3])
        assert resumed[0].num_prompt_tokens == 3
        assert resumed[0].num_cached_tokens == 5
        assert resumed[0].floors == Floors(encoder_floor=1, decoder_floor=2, hits=(2,)), "as the first attempt said"
        assert resumed[0].stop.max_tokens == 8


async def test_floors_are_not_taken_to_workers_where_they_mean_something_else():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("die",)))
        space = Namespace(model="m", revision="other", tokenizer="t", kv_dtype="f32", page_tokens=16).encode()
        alike = registration("d1", Role.DECODE).fingerprint
        other = gateway.add_decode("d2", planned("d2", first=0), namespace=space, fingerprint=alike)
        resumed = []
        for _ in range(4):
            await collect(gateway.orchestrator, ASKED)
            resumed += [submit.request for submit in other.seen if submit.request.attempt > 0]
        assert resumed
        assert all(request.floors is None for request in resumed)


async def test_usage_stays_that_of_the_first_attempt():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 1), ("die",)))
        gateway.add_decode("d2", planned("d2", ("tokens", 1), ("die",), first=0))
        _, _, cached, _ = await collect(gateway.orchestrator, ASKED)
        assert cached == 5


async def test_a_death_between_last_token_and_goodbye_needs_no_other_worker():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("vanish",)))
        tokens, finish, _, _ = await collect(gateway.orchestrator, ASKED)
        assert (tokens, finish) == (ANSWER, FinishReason.LENGTH)
        assert worker.counts["submits"] == 1


async def test_a_broken_connection_is_reattached_and_nothing_is_lost_or_repeated():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("tokens", 3), ("break",)))
        tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
        assert tokens == ANSWER
        assert worker.counts["submits"] == 1
        assert gateway.opener.opened == 2


async def test_a_worker_that_kept_nothing_of_the_stream_is_lost_and_resumed():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("break",), first=1, keep_frames=False))
        tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
        assert tokens == ANSWER


async def test_lost_tokens_are_noticed_by_position_and_computed_again():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("tokens", 2), ("skip", 2), first=1, step_s=0.002))
        tokens, _, _, _ = await collect(gateway.orchestrator, prompt(max_tokens=30))
        assert tokens == sim_answer(ASKED.token_ids, 30)
        assert worker.counts["aborts"] == 1


async def test_another_prefill_worker_is_named_without_repeating_the_decode_half():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_prefill("p2")
        worker = gateway.add_decode("d1", planned("d1", ("need", "worker_lost")))
        tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
        assert tokens == ANSWER
        assert (worker.counts["submits"], worker.counts["places"]) == (1, 1)


async def test_the_decode_worker_computes_when_no_prefill_worker_is_left():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("need", "worker_lost"), ("need", "worker_lost")))
        tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
        assert tokens == ANSWER
        assert worker.counts["places"] == 1
        assert gateway.own_work() == (0, 0)


async def test_placements_within_one_attempt_are_bounded():
    async with sim_gateway() as gateway:
        for index in range(10):
            gateway.add_prefill(f"p{index}")
        worker = gateway.add_decode("d1", planned("d1", *[("need", "worker_lost")] * 10))
        await collect(gateway.orchestrator, ASKED)
        assert worker.counts["places"] == 3


@pytest.mark.parametrize("code", ["no_capacity", "draining", "transfer_failed", "lease_lost", "invariant"])
async def test_retryable_errors_before_the_first_token_are_invisible(code):
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("error", code)))
        gateway.add_decode("d2")
        for _ in range(4):
            tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
            assert tokens == ANSWER


async def test_a_client_error_is_never_tried_again():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("error", "invalid_request")))
        with pytest.raises(BadRequest, match="planned"):
            await collect(gateway.orchestrator, ASKED)
        assert worker.counts["submits"] == 1


async def test_a_request_that_kills_every_worker_is_given_up():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        for index in range(6):
            gateway.add_decode(f"d{index}", planned(f"d{index}", ("tokens", 1), ("die",)))
        with pytest.raises(WorkerLost):
            await collect(gateway.orchestrator, ASKED)
        assert sum(worker.dead for worker in gateway.workers.values()) == 3


async def test_without_workers_a_known_model_is_busy_and_an_unknown_one_unknown():
    async with sim_gateway() as gateway:
        gateway.orchestrator.registered(registration("d1", Role.DECODE))
        with pytest.raises(NoWorker) as caught:
            await collect(gateway.orchestrator, ASKED)
        assert caught.value.http_status == 503
        assert caught.value.retry_after_s
        with pytest.raises(UnknownModel):
            await collect(gateway.orchestrator, prompt(model="other"))


async def test_a_new_request_waits_a_moment_for_a_worker_to_appear():
    async with sim_gateway() as gateway:
        answer = asyncio.create_task(collect(gateway.orchestrator, ASKED))
        await asyncio.sleep(0.01)
        gateway.add_prefill("p1")
        gateway.add_decode("d1")
        assert (await answer)[0] == ANSWER


async def test_the_only_worker_died_and_its_successor_resumes():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("die",)))
        stream = gateway.orchestrator.generate(ASKED)
        tokens = []
        async with aclosing(stream):
            async for delta in stream:
                tokens.extend(delta.token_ids)
                if len(tokens) == 3:
                    for _ in range(100):
                        if gateway.workers["d1"].dead:
                            break
                        await asyncio.sleep(0)
                    gateway.directory.disconnected(gateway.directory.find("d1"))
                    gateway.add_decode("d1", SimDecode("d1-b"), incarnation="d1-b")
        assert tokens == ANSWER


async def test_a_resume_that_finds_no_worker_in_time_ends_with_worker_lost():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 3), ("die",)))
        with pytest.raises(WorkerLost) as caught:
            await collect(gateway.orchestrator, ASKED)
        assert caught.value.retry_after_s


async def test_a_prompt_that_never_fits_is_refused_with_numbers():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", max_tokens_total=3)
        with pytest.raises(NeverFits, match="3 tokens; this deployment fits at most 2"):
            await collect(gateway.orchestrator, ASKED)


async def test_the_deadline_ends_a_request_that_hangs_and_aborts_it():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", planned("d1", ("tokens", 2), ("wait", 10**9)))
        with pytest.raises(DeadlineExceeded):
            await collect(gateway.orchestrator, prompt(timeout_s=0.1))
        await until(lambda: worker.running == 0)
        assert gateway.own_work() == (0, 0)


async def until(condition, tries=2000):
    for _ in range(tries):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


async def test_closing_the_iterator_aborts_on_the_worker_within_a_step():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", SimDecode("d1-a", step_s=0.02))
        stream = gateway.orchestrator.generate(prompt(max_tokens=1000))
        received = 0
        async for delta in stream:
            received += len(delta.token_ids)
            if received >= 3:
                break
        await stream.aclose()
        steps = worker.counts["steps"]
        await until(lambda: worker.running == 0)
        assert worker.counts["steps"] <= steps + 1
        assert worker.counts["aborts"] == 1
        assert gateway.admission.in_flight == 0
        assert gateway.own_work() == (0, 0)


async def test_a_cancelled_consumer_aborts_too():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1", SimDecode("d1-a", step_s=0.01))
        consumer = asyncio.create_task(collect(gateway.orchestrator, prompt(max_tokens=1000)))
        await until(lambda: worker.counts["tokens"] > 2)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await until(lambda: worker.running == 0)
        assert gateway.admission.in_flight == 0


async def test_many_samples_share_one_frame_a_step():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1")
        asked = [prompt(tokens=(index, 1), max_tokens=20) for index in range(64)]
        answers = await asyncio.gather(*(collect(gateway.orchestrator, one) for one in asked))
        assert [answer[0] for answer in answers] == [sim_answer(one.token_ids, 20) for one in asked]
        assert worker.counts["frames"] <= worker.counts["steps"]


async def test_beyond_its_bounds_the_gateway_says_when_to_come_back():
    async with sim_gateway(limits=Limits(max_in_flight=1, max_queued=0)) as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", SimDecode("d1-a", step_s=0.005))
        first = asyncio.create_task(collect(gateway.orchestrator, ASKED))
        await asyncio.sleep(0)
        with pytest.raises(NoCapacity) as caught:
            await collect(gateway.orchestrator, ASKED)
        assert caught.value.retry_after_s >= 1
        await first


async def test_a_draining_worker_gets_no_further_request():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        worker = gateway.add_decode("d1")
        gateway.add_decode("d2")
        worker.draining = True
        for _ in range(6):
            tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
            assert tokens == ANSWER
        assert worker.counts["submits"] <= 1


async def test_a_deadline_that_passes_between_two_attempts_ends_the_third():
    rules = RetryRules(pause_s=1.0, longest_pause_s=1.0)
    async with sim_gateway(retries=rules) as gateway:
        gateway.add_prefill("p1")
        plans = [(("error", "no_capacity"),), (("error", "no_capacity"),)]
        worker = SimDecode("d1-a", plan=lambda submit: plans.pop() if plans else (("wait", 10**9),))
        gateway.add_decode("d1", worker)
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded):
                await collect(gateway.orchestrator, prompt(timeout_s=0.2))
        assert gateway.own_work() == (0, 0)
        assert gateway.admission.in_flight == 0


async def test_a_deadline_that_passes_while_no_worker_is_there_is_told_at_once():
    rules = RetryRules(pause_s=0.4, start_wait_s=5.0)
    async with sim_gateway(retries=rules) as gateway:
        gateway.add_prefill("p1")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await collect(gateway.orchestrator, prompt(timeout_s=0.1))
        assert asyncio.get_running_loop().time() - begun < 0.35


async def test_a_probe_that_streams_for_long_lets_others_in_before_it_ends():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 10), ("wait", 10**9), first=1))
        member = gateway.directory.find("d1")
        for ago in (9.0, 8.0, 7.0):
            member.breaker.failed(gateway.clock.now() - ago)
        async with aclosing(gateway.orchestrator.generate(prompt(max_tokens=100))) as probe:
            seen = 0
            while seen < 10:
                seen += len((await anext(probe)).token_ids)
            tokens, _, _, _ = await collect(gateway.orchestrator, ASKED)
            assert tokens == ANSWER


async def test_a_probe_that_only_forwards_a_first_token_keeps_others_out():
    async with sim_gateway() as gateway:
        gateway.add_prefill("p1")
        gateway.add_decode("d1", planned("d1", ("tokens", 1), ("wait", 10**9), first=1))
        member = gateway.directory.find("d1")
        for ago in (9.0, 8.0, 7.0):
            member.breaker.failed(gateway.clock.now() - ago)
        async with aclosing(gateway.orchestrator.generate(prompt(max_tokens=100))) as probe:
            while not (await anext(probe)).token_ids:
                pass
            with pytest.raises(NoCapacity):
                await collect(gateway.orchestrator, ASKED)


async def test_router_135_a_model_stays_listed_when_all_its_workers_are_gone():
    async with sim_gateway() as gateway:
        gateway.add_decode("d1")
        listed = gateway.orchestrator.models()
        assert len(listed) == 1
        gateway.directory.deregister(gateway.directory.find("d1"))
        assert gateway.directory.find("d1") is None
        assert gateway.orchestrator.models() == listed
