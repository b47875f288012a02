"""Random failure scripts: every client sees each token once, in order, and exactly one end; nothing stays held."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TandemError
from core.ids import Incarnation
from gateway.attempt import RetryRules
from gateway.resume import Output
from tests.fakes.sim_decode import SimDecode, sim_answer
from tests.fakes.sim_gateway import prompt, sim_gateway

MAX_TOKENS = 12
RULES = RetryRules(
    pause_s=0.0005, longest_pause_s=0.001, start_wait_s=0.2, resume_wait_s=0.5, max_failures=8, max_crashes=8
)

action = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.integers(1, 3)),
    st.tuples(st.just("repeat"), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(1, 2)),
    st.tuples(st.just("error"), st.sampled_from(["no_capacity", "draining", "transfer_failed", "invariant"])),
    st.tuples(st.just("need"), st.sampled_from(["worker_lost", "no_capacity", "lease_lost"])),
    st.tuples(st.just("break")),
    st.tuples(st.just("die")),
    st.tuples(st.just("vanish")),
)
plans = st.lists(st.lists(action, max_size=4), max_size=8)
closings = st.lists(st.one_of(st.none(), st.integers(0, MAX_TOKENS)), min_size=1, max_size=4)


class Plans:
    """Hands the next plan to whoever gets the next request; afterwards all is well."""

    def __init__(self, plans):
        self.left = list(plans)

    def __call__(self, submit):
        return self.left.pop(0) if self.left else ()


async def client(orchestrator, number, close_after):
    """Return how the sample ended: its tokens, and the finish, error or own closing."""
    asked = prompt(tokens=(number + 1, 7, 9), max_tokens=MAX_TOKENS)
    tokens, ends = [], []
    try:
        async with aclosing(orchestrator.generate(asked)) as stream:
            async for delta in stream:
                assert not ends
                tokens.extend(delta.token_ids)
                if delta.finish is not None:
                    ends.append(delta.finish)
                elif close_after is not None and len(tokens) >= close_after:
                    ends.append("closed")
                    break
    except TandemError as error:
        ends.append(error)
    assert len(ends) == 1
    assert tokens == sim_answer(asked.token_ids, len(tokens))
    if not isinstance(ends[0], TandemError) and ends[0] != "closed":
        assert len(tokens) == MAX_TOKENS
    return ends[0]


async def restart_dead(gateway, plan):
    """What a launcher does: a dead worker comes back under its name, as another incarnation."""
    number = 0
    while True:
        await asyncio.sleep(0.001)
        for name in ("d1", "d2"):
            if gateway.workers[name].dead:
                number += 1
                member = gateway.directory.find(name)
                if member is not None:
                    gateway.directory.disconnected(member)
                    gateway.links.replaced(member.incarnation)
                incarnation = Incarnation(f"{name}-{number}")
                gateway.add_decode(name, SimDecode(incarnation, plan=plan), incarnation=incarnation)


async def run_script(script, closings):
    plan = Plans(script)
    async with sim_gateway(retries=RULES) as gateway:
        gateway.directory._rules = gateway.directory._rules.__class__(threshold=10**6)
        gateway.add_prefill("p1")
        gateway.add_prefill("p2")
        for name in ("d1", "d2"):
            gateway.add_decode(name, SimDecode(f"{name}-a", plan=plan))
        launcher = asyncio.create_task(restart_dead(gateway, plan))
        clients = [client(gateway.orchestrator, number, after) for number, after in enumerate(closings)]
        ends = await asyncio.gather(*clients)
        for _ in range(500):
            if not any(worker.running for worker in gateway.workers.values() if not worker.dead):
                break
            await asyncio.sleep(0.001)
        launcher.cancel()
        await asyncio.gather(launcher, return_exceptions=True)
        assert gateway.admission.in_flight == 0
        assert gateway.own_work() == (0, 0)
        live = [worker for worker in gateway.workers.values() if not worker.dead]
        assert sum(worker.running for worker in live) == 0
        return ends


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans, closings)
def test_every_sample_ends_once_with_each_token_once(script, closings):
    ends = asyncio.run(run_script(script, closings))
    if not script:
        assert not [end for end in ends if isinstance(end, TandemError)]


def test_the_property_can_fail(monkeypatch):
    """Negative control: without counting by position, a repeated run reaches the client twice."""

    def accept_blindly(self, position, tokens, logprobs):
        self.tokens.extend(tokens)
        return tokens, logprobs

    monkeypatch.setattr(Output, "accept", accept_blindly)
    with pytest.raises(AssertionError):
        asyncio.run(run_script([[("tokens", 3), ("repeat", 2)]], [None]))
