"""Random lives of requests on a decode worker: every handle ends once, every token comes once, nothing is left held.

The engine and the puller are fakes that the drawn script moves; the oracle is the pure reply of the fake model.
"""

import asyncio
import contextlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from core.errors import Aborted, BadRequest, LeaseLost, TandemError, TransferFailed, WorkerLost
from core.stream import AbortRequest, Errored, Finished, Place
from decode_worker.hosting import EngineDesk
from decode_worker.ledger import RequestLedger
from decode_worker.requests import Request
from decode_worker.streams import GatewayStream, StreamConfig
from tests.fakes.decode import P1, P2, DecodeRig, InProcessGateway, settle
from tests.fakes.engine import ask, reply

MAX_TOKENS = 6
ERRORS = [WorkerLost("gone"), LeaseLost("lapsed"), TransferFailed("no bytes"), BadRequest("not this one")]

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("final"), st.integers(0, 9)),
    st.tuples(st.just("done"), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.sampled_from(ERRORS)),
    st.tuples(st.just("place"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("cut"), st.booleans()),
    st.tuples(st.just("late"), st.integers(0, 9)),
)


def prompt(handle):
    return (handle + 1, 2 * handle + 5, 7)


class Story:
    """Applies actions; remembers what must come true."""

    def __init__(self, rig, gateway) -> None:
        self.rig = rig
        self.gateway = gateway
        self.next_handle = 0
        self.aborted = set()
        self.silent = set()
        """Handles that were aborted before their terminal record came: none may come."""

    def open_pulls(self):
        return [pull for pull in self.rig.puller.pulls if not pull.outcome.done() and not pull.cancelled]

    async def apply(self, action):
        kind, *values = action
        await getattr(self, kind)(*values)
        await settle(8)
        if self.gateway.connection.done():
            self.gateway.connection.result()
        # What nobody waits for is not computed, booked or pulled any more.
        assert len(self.rig.engine.seqs) <= self.rig.ledger.num_live
        assert not any(self.gateway.terminal(handle) for handle in self.silent)

    async def submit(self, remote):
        handle = self.next_handle
        self.next_handle += 1
        self.gateway.submit(handle, ask(prompt(handle), MAX_TOKENS), P1 if remote else None)

    async def step(self, times):
        for _ in range(times):
            self.rig.engine.step()
            await settle(8)

    async def final(self, number):
        if (waiting := [p for p in self.open_pulls() if p.first is None]) and (pull := waiting[number % len(waiting)]):
            pull.final()

    async def done(self, number):
        if ready := [p for p in self.open_pulls() if p.first is not None]:
            ready[number % len(ready)].done()

    async def fail(self, number, error):
        if pulls := self.open_pulls():
            pulls[number % len(pulls)].fail(error)

    async def place(self, handle, somewhere):
        self.gateway.send(Place(handle=handle, prefill=P2 if somewhere else None))

    async def abort(self, handle):
        if handle < self.next_handle:
            self.aborted.add(handle)
            if self.gateway.terminal(handle) is None:
                self.silent.add(handle)
            self.gateway.send(AbortRequest(handle=handle))

    async def late(self, number):
        if seqs := [s for s in self.rig.engine.seqs.values() if s.state in ("running", "waiting")]:
            self.rig.engine.fail(seqs[number % len(seqs)].id, WorkerLost("made up"))

    async def cut(self, merges):
        await self.gateway.cut()
        if merges:
            self.rig.engine.step()
        self.gateway.connect(resume_after=self.gateway.last)

    async def finish(self):
        """Let everything end: pulls complete, the gateway answers, the engine runs dry."""
        for _ in range(200):
            await settle(8)
            for pull in self.open_pulls():
                if pull.first is None:
                    pull.final()
                pull.done()
            for request in self.rig.ledger.live():
                if request.place is not None:
                    self.gateway.send(Place(handle=request.handle, prefill=None))
            await settle(8)
            self.rig.engine.step()
            if not self.rig.ledger.num_live and not self.rig.engine.seqs:
                break
        await settle(20)


async def tell(actions):
    rig = DecodeRig(stream=StreamConfig(replay_s=60), rows=1, pages=400)
    gateway = InProcessGateway(rig.service)
    gateway.connect()
    await settle()
    story = Story(rig, gateway)
    try:
        for action in actions:
            await story.apply(action)
        await story.finish()
        check(rig, gateway, story)
    finally:
        await gateway.cut()
        await rig.tasks.close()


def check(rig, gateway, story):
    assert rig.engine.audit() == []
    assert rig.ledger.num_live == 0
    for handle in range(story.next_handle):
        whole = reply(prompt(handle), MAX_TOKENS)
        told = gateway.tokens.get(handle, [])
        end = gateway.terminal(handle)
        assert told == whole[: len(told)]
        if isinstance(end, Finished):
            assert told == whole
            assert end.num_output_tokens == len(whole)
        elif not isinstance(end, Errored):
            assert handle in story.aborted


SCRIPTS = st.lists(ACTIONS, min_size=5, max_size=40)


def run(actions):
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(tell(actions))


@settings(max_examples=60)
@given(SCRIPTS)
def test_every_request_ends_once_with_the_right_tokens_and_leaves_nothing(actions):
    run(actions)


def rewind_and_lose(self, after, rewind=GatewayStream.rewind):
    rewind(self, after)
    self._pending.deltas.clear()


MUTANTS = {
    "an abort that never reaches the engine": (EngineDesk, "abort", lambda self, seq: None),
    "a booking that is never given back": (EngineDesk, "give_back", lambda self, seq: None),
    "a hand-over that outlives its request": (RequestLedger, "_release", lambda self, r: self.unbind(r)),
    "a recomputation that forgets the token sent on": (Request, "continued", lambda self: self.asked),
    "a terminal record for an aborted handle": (RequestLedger, "give_up", lambda self, r: self.fail(r, Aborted("x"))),
    "a re-attachment that loses what was merged meanwhile": (GatewayStream, "rewind", rewind_and_lose),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_planted_mutant_is_caught(name):
    def failing():
        @settings(
            max_examples=200, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False
        )
        @given(SCRIPTS)
        def check_all(actions):
            run(actions)

        check_all()

    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, TandemError, BaseExceptionGroup)):
        patch.setattr(*MUTANTS[name])
        failing()
