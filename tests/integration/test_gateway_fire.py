"""Workers die, stall, refuse and come back as others, under load: each request ends once, with each token once."""

import asyncio
import random
from collections import Counter
from contextlib import aclosing

import pytest

from benchmarks.record import write_record
from core.ids import Handle, Incarnation, RequestId
from gateway.attempt import RetryRules
from gateway.worker_link import WorkerLink
from tests.fakes.fire import STEP_S, Answer, burn, faults
from tests.fakes.sim_cluster import sim_cluster
from tests.fakes.sim_decode import SimDecode, sim_answer
from tests.fakes.sim_gateway import prompt, sim_gateway

WORKERS = ("p1", "p2", "d1", "d2", "d3")


async def fire(directory, **amounts):
    async with sim_cluster(directory, *WORKERS, step_s=STEP_S) as cluster:
        answers, deeds = await burn(cluster, **amounts)
        found = [
            fault for answer in answers for fault in faults(answer, cluster.text_of(answer.prompt, answer.max_tokens))
        ]
        await cluster.settled("gateway-1", "in_flight", 0)
        await cluster.settled("gateway-1", "open_handles", 0)
        values = await cluster.statistics("gateway-1")
        leases = {name: values[name] for name in values if name.startswith("leases_")}
        return answers, deeds, found, leases, values


@pytest.mark.cluster
async def test_under_fire_every_request_ends_once_and_no_token_is_lost_or_doubled(tmp_path):
    answers, deeds, found, leases, values = await fire(tmp_path, streams=16, num_harms=4, seed=5)
    assert found == []
    assert len(deeds) == 4
    assert len(answers) >= 16
    assert set(leases.values()) == {0.0}
    assert values["own_requests"] == 0


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_under_fire_for_long(tmp_path):
    answers, deeds, found, leases, _ = await fire(tmp_path, streams=48, num_harms=32, seed=11)
    tokens = sum(answer.max_tokens for answer in answers)
    result = {"requests": len(answers), "tokens": tokens, "harms": dict(deeds), "faults": found, "leases": leases}
    write_record("gateway_fire", result, note="gateway process, 2 prefill and 3 decode workers simulated as processes")
    assert found == []
    assert set(leases.values()) == {0.0}


@pytest.mark.parametrize(
    "planted",
    [
        Answer((1,), 3, text="ab", finishes=["length"], ends=["[DONE]"], usage={"completion_tokens": 3}),
        Answer((1,), 3, text="abcc", finishes=["length"], ends=["[DONE]"], usage={"completion_tokens": 3}),
        Answer((1,), 3, text="abc", finishes=["length"], ends=["[DONE]", "closed"], usage={"completion_tokens": 3}),
        Answer((1,), 3, text="abc", finishes=["length"] * 2, ends=["[DONE]"], usage={"completion_tokens": 3}),
        Answer((1,), 3, text="abc", finishes=["length"], ends=["worker_lost"], usage={"completion_tokens": 3}),
        Answer((1,), 3, text="abc", finishes=["length"], ends=["[DONE]"], usage={"completion_tokens": 2}),
    ],
)
def test_the_checker_finds_planted_faults(planted):
    """Negative control."""
    assert faults(planted, "abc")
    assert not faults(Answer((1,), 3, "abc", ["length"], ["[DONE]"], {"completion_tokens": 3}), "abc")


# Work done: in one process, where every execution can be counted.


class Counting(SimDecode):
    """Counts prompts computed and lost, by request."""

    def __init__(self, incarnation, plan, executed, lost):
        super().__init__(incarnation, plan=plan)
        self.on_prompt = lambda request: executed.update([request.request_id])
        self._lost = lost
        self._names = {}

    def _submit(self, session, submit):
        self._names[submit.handle] = submit.request.request_id
        super()._submit(session, submit)

    def kill(self):
        for session in self.sessions.values():
            # What it still had, and what it had said in frames that may never have arrived.
            unheard = {handle for frame in session.unacknowledged for handle in frame.handles}
            self._lost.update(self._names[handle] for handle in unheard | session.requests.keys())
        super().kill()


def random_plan(rng, submit, lost):
    kind = rng.randrange(7)
    if kind == 0:
        return [("tokens", rng.randrange(1, 6)), ("die",)]
    if kind == 1:
        return [("error", "no_capacity")]
    if kind == 2:
        return [("need", "worker_lost")]
    if kind == 3:
        lost.update([submit.request.request_id])
        return [("tokens", rng.randrange(1, 6)), ("error", "transfer_failed")]
    return []


async def executions(seed, *, calm=False):
    rng, executed, lost, ends = random.Random(seed), Counter(), Counter(), Counter()
    rules = RetryRules(pause_s=0.0005, longest_pause_s=0.001, max_failures=20, max_crashes=20, budget_burst=1000.0)

    def plan(submit):
        return [] if calm else random_plan(rng, submit, lost)

    async with sim_gateway(retries=rules) as gateway:
        gateway.directory._rules = gateway.directory._rules.__class__(threshold=10**6)
        gateway.add_prefill("p1")
        gateway.add_prefill("p2")
        for name in ("d1", "d2", "d3"):
            gateway.add_decode(name, Counting(f"{name}-a", plan, executed, lost))

        async def launcher():
            for number in range(10**6):
                await asyncio.sleep(0.001)
                for name in ("d1", "d2", "d3"):
                    if gateway.workers[name].dead:
                        member = gateway.directory.find(name)
                        if member is not None:
                            gateway.directory.disconnected(member)
                            gateway.links.replaced(member.incarnation)
                        told = Incarnation(f"{name}-{number}")
                        gateway.add_decode(name, Counting(told, plan, executed, lost), incarnation=told)

        async def one(number):
            asked = prompt((number + 3, 7), max_tokens=12, request_id=RequestId(f"r{number}"), timeout_s=30.0)
            tokens = []
            async with aclosing(gateway.orchestrator.generate(asked)) as deltas:
                async for delta in deltas:
                    tokens.extend(delta.token_ids)
            assert tokens == sim_answer(asked.token_ids, 12)
            ends["ok"] += 1

        keeper = asyncio.create_task(launcher())
        clients = asyncio.gather(*(one(number) for number in range(60)))
        await asyncio.wait((clients, keeper), return_when=asyncio.FIRST_COMPLETED)
        assert not keeper.done(), keeper.exception()
        await clients
        keeper.cancel()
        assert gateway.leases.counts() == dict.fromkeys(("request", "queued", "permit", "attempt"), 0)
    return executed, lost, ends


@pytest.mark.parametrize("seed", range(3))
async def test_a_prompt_is_computed_again_only_if_it_was_lost(seed):
    executed, lost, ends = await executions(seed)
    assert ends["ok"] == 60
    assert max(executed.values()) > 1, "nothing was lost: the test shows nothing"
    wasted = {name: (count, lost[name]) for name, count in executed.items() if count > 1 + lost[name]}
    assert wasted == {}


async def test_a_gateway_that_asks_two_workers_at_once_is_seen(monkeypatch):
    """Negative control of the test above."""
    submit = WorkerLink.submit

    def twice(self, handle, request, prefill):
        submit(self, Handle(handle + 10**6), request, prefill)
        return submit(self, handle, request, prefill)

    monkeypatch.setattr(WorkerLink, "submit", twice)
    executed, lost, _ = await executions(0, calm=True)
    assert any(count > 1 + lost[name] for name, count in executed.items())
