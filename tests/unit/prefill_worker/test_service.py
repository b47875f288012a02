"""Source sequences: started for hand-overs, told of in order, released whatever happens."""

import asyncio

import pytest

from core.clock import ManualClock
from core.errors import DeadlineExceeded, NeverFits, NoCapacity
from core.kv import PageRef
from prefill_worker.service import PrefillService
from tests.fakes.engine import EngineOnThread, FakeEngine, InlineEngine, ask, next_token

PROMPT = (1, 2, 3, 4, 5)


class Heard:
    """Keeps what the transfer layer would hear."""

    def __init__(self) -> None:
        self.events = []

    def chunk_final(self, seq, start, end, pages, hits):
        self.take(seq, ("chunk", start, end, pages))

    def prefilled(self, seq, **facts):
        self.take(seq, ("prefilled", facts))

    def failed(self, seq, error):
        self.take(seq, ("failed", error))

    def take(self, seq, event):
        self.events.append(event)


class Sink:
    def __init__(self, loop) -> None:
        self.loop = loop
        self.service = None

    def emit(self, events):
        self.loop.call_soon_threadsafe(self.service.on_step, events)


class Rig:
    def __init__(self, bridge=InlineEngine, **engine) -> None:
        loop = asyncio.get_running_loop()
        sink = Sink(loop)
        self.engine = FakeEngine(sink=sink, **engine)
        self.bridge = bridge(self.engine)
        self.service = sink.service = PrefillService(self.bridge, ManualClock(), loop)
        self.heard = Heard()
        self.service.connect(self.heard)

    async def start(self, request):
        return await self.service.start(request, 10.0)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_transfer_layer_hears_of_chunks_and_of_the_first_token():
    rig = Rig(cached_tokens=2)
    await rig.start(ask(PROMPT))
    rig.engine.step()
    await settle()
    (chunk, prefilled) = rig.heard.events
    assert chunk[:3] == ("chunk", 0, 5)
    assert all(isinstance(page, PageRef) for page in chunk[3])
    assert prefilled[1]["first_tokens"] == (next_token(PROMPT),)
    assert (prefilled[1]["num_tokens"], prefilled[1]["num_cached_tokens"], prefilled[1]["finish"]) == (5, 2, "")


async def test_a_first_token_that_ends_the_request_says_how():
    rig = Rig()
    await rig.start(ask(PROMPT, max_tokens=1))
    rig.engine.step()
    await settle()
    assert rig.heard.events[-1][1]["finish"] == "length"


@pytest.mark.parametrize(
    ("request_", "error"), [(ask(range(1, 300)), NeverFits), (ask(PROMPT), NoCapacity)], ids=["never fits", "busy"]
)
async def test_a_refusal_of_the_engine_is_raised_by_start(request_, error):
    rig = Rig()
    if error is NoCapacity:
        rig.engine.refuse = NoCapacity("busy", retry_after_s=1.0)
    with pytest.raises(error):
        await rig.service.start(request_, 10.0)
    assert rig.engine.audit() == []


async def test_a_failed_prompt_is_told_once():
    rig = Rig()
    seq = await rig.start(ask(PROMPT))
    rig.engine.fail(seq, DeadlineExceeded("late"))
    await settle()
    assert [event[0] for event in rig.heard.events] == ["failed"]
    assert rig.service.statistics()["prompts_failed_total"] == 1


async def test_stop_releases_in_any_state_and_more_than_once():
    rig = Rig()
    waiting, held = await rig.start(ask(PROMPT)), await rig.start(ask(PROMPT))
    rig.engine.step()
    rig.service.stop(waiting)
    rig.service.stop(held)
    rig.service.stop(held)
    assert rig.engine.audit() == []


async def test_a_start_whose_caller_gave_up_leaves_nothing_behind():
    rig = Rig(EngineOnThread)
    gate = asyncio.Event()
    rig.bridge.post(lambda engine: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result())
    loop = asyncio.get_running_loop()
    rig.bridge.start()
    try:
        starting = asyncio.create_task(rig.service.start(ask(PROMPT), 10.0))
        await settle()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        gate.set()
        await rig.bridge.call(lambda engine: None)
        await settle()
        assert await rig.bridge.call(lambda engine: engine.audit()) == []
    finally:
        rig.bridge.stop()


async def test_epochs_are_asked_of_the_engine():
    rig = Rig()
    seq = await rig.start(ask(PROMPT))
    assert rig.service.epochs_unchanged(seq)
    rig.engine.valid_epochs = False
    assert not rig.service.epochs_unchanged(seq)
