"""A decode worker's asyncio half over a fake engine and a scripted puller, and a gateway that talks to it in process."""

import asyncio

from core.aio import Tasks
from core.clock import ManualClock
from core.ids import Handle, Incarnation, WorkerId
from core.stream import Ack, Errored, Finished, Logprobs, NeedPrefill, PrefillTarget, Started, StreamHello, Submit
from decode_worker.hosting import EngineDesk
from decode_worker.ledger import RequestLedger
from decode_worker.placement import PrefillMode
from decode_worker.receiver import PrefillConfig, Receiver
from decode_worker.service import DecodeService
from decode_worker.streams import GatewayStreams, StreamConfig
from kv_transfer.api import FirstTokens, Pulled
from tests.fakes.engine import FakeEngine, InlineEngine, next_token

WORKER = Incarnation("d" * 32)
GATEWAY = Incarnation("a" * 32)
P1 = PrefillTarget(worker_id=WorkerId("prefill-1"), address="p1:1", incarnation=Incarnation("1" * 32))
P2 = PrefillTarget(worker_id=WorkerId("prefill-2"), address="p2:1", incarnation=Incarnation("2" * 32))


class Pull:
    """One pull in progress, moved by the test."""

    def __init__(self, puller, arguments) -> None:
        self.puller = puller
        self.request = arguments["request"]
        self.seq = arguments["seq"]
        self.address = arguments["address"]
        self.prefix_tokens = arguments["prefix_tokens"]
        self.on_first = arguments["on_first"]
        self.cancelled = False
        self.outcome = asyncio.get_running_loop().create_future()
        self.first = None

    def final(self, finish="", logprobs=(), cached=0):
        """FINAL arrives."""
        token = next_token(self.request.token_ids)
        self.first = FirstTokens(tokens=(token,), logprobs=logprobs, num_cached_tokens=cached, finish=finish)
        self.on_first(self.first)

    def done(self):
        """The hand-over is validated."""
        self.outcome.set_result(
            Pulled(first=self.first, num_tokens=len(self.request.token_ids), bytes_pulled=64, chunks=1)
        )

    def fail(self, error):
        self.outcome.set_exception(error)


class ScriptedPuller:
    """A destination that lands pages through its host, then does what the test says; drops exactly once on failure."""

    def __init__(self) -> None:
        self.host = None
        self.pulls: list[Pull] = []
        self._news = asyncio.Event()

    async def pull(self, **arguments):
        pull = Pull(self, arguments)
        self.pulls.append(pull)
        self._news.set()
        committed = False
        try:
            await self.host.land(pull.seq, 0, len(pull.request.token_ids))
            result = await pull.outcome
            committed = True
        except asyncio.CancelledError:
            pull.cancelled = True
            raise
        finally:
            if not committed:
                self.host.drop(pull.seq, ())
        return result

    async def next(self, number=1):
        """Wait until `number` pulls began; return the last."""
        while len(self.pulls) < number:
            self._news.clear()
            async with asyncio.timeout(30):
                await self._news.wait()
        return self.pulls[number - 1]


class _Sink:
    def __init__(self) -> None:
        self.service = None

    def emit(self, events):
        self.service.on_step(events)


class DecodeRig:
    """Everything of a decode worker but threads, gRPC and tensors."""

    def __init__(self, *, mode="remote", stream=None, threshold=0, place_timeout_s=5.0, **engine) -> None:
        sink = _Sink()
        self.clock = ManualClock()
        self.engine = FakeEngine(sink=sink, **engine)
        self.desk = EngineDesk(InlineEngine(self.engine), asyncio.get_running_loop())
        self.ledger = RequestLedger(self.desk)
        self.puller = ScriptedPuller()
        self.puller.host = self.desk
        self.tasks = Tasks()
        self.streams = GatewayStreams(WORKER, stream or StreamConfig(), self.clock)
        config = PrefillConfig(mode=PrefillMode(mode), auto_threshold_tokens=threshold, place_timeout_s=place_timeout_s)
        receiver = Receiver(config, self.desk, self.ledger, self.puller, self.clock)
        self.service = DecodeService(
            streams=self.streams, ledger=self.ledger, receiver=receiver, tasks=self.tasks, clock=self.clock
        )
        sink.service = self.service

    async def run_dry(self, limit=1000):
        """Step until no sequence waits or runs."""
        for _ in range(limit):
            await settle()
            if not any(s.state in ("waiting", "running") for s in self.engine.seqs.values()):
                return
            self.engine.step()
        raise AssertionError("the engine never came to rest")


async def settle(rounds=20):
    """Let everything that can run without time passing do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class InProcessGateway:
    """A gateway's end of one stream: sends frames, keeps what arrives, by handle."""

    def __init__(self, service, gateway=GATEWAY, *, acks=True) -> None:
        self.service = service
        self.gateway = gateway
        self.acks = acks
        self.frames = []
        self.tokens: dict[int, list[int]] = {}
        self.records: dict[int, list] = {}
        self.logprobs: dict[int, list] = {}
        self.readable = asyncio.Event()
        self.readable.set()
        self.last = 0
        self.connection = None
        self._outbox = None
        self._news = asyncio.Event()

    def connect(self, resume_after=-1, worker=WORKER):
        self._outbox = asyncio.Queue()
        hello = StreamHello(gateway=self.gateway, worker=worker, resume_after=resume_after)
        self.connection = asyncio.create_task(self.service.connect(hello, self._frames(self._outbox), self._take))

    async def _frames(self, outbox):
        while (frame := await outbox.get()) is not None:
            yield frame

    def send(self, frame):
        self._outbox.put_nowait(frame)

    def submit(self, handle, request, prefill=None):
        self.send(Submit(handle=Handle(handle), request=request, prefill=prefill))

    async def cut(self):
        """Break the connection as a network does."""
        self.connection.cancel()
        await asyncio.gather(self.connection, return_exceptions=True)

    async def _take(self, frame):
        await self.readable.wait()
        assert frame.sequence == self.last + 1, "a frame was lost or repeated"
        self.last = frame.sequence
        self.frames.append(frame)
        at = 0
        for handle, position, count in zip(frame.handles, frame.positions, frame.counts, strict=True):
            known = self.tokens.setdefault(handle, [])
            assert position == len(known) + self.base(handle), "a token was lost or repeated"
            known += frame.tokens[at : at + count]
            at += count
        assert at == len(frame.tokens)
        for record in frame.records:
            if isinstance(record, Logprobs):
                self.logprobs.setdefault(record.handle, []).extend(record.items)
            else:
                self.records.setdefault(record.handle, []).append(record)
        if self.acks:
            self.send(Ack(sequence=frame.sequence))
        self._news.set()

    def base(self, handle):
        """Output index of a handle's first token here; tests of resumed requests override it."""
        return 0

    def of(self, handle, kind):
        return [r for r in self.records.get(handle, []) if isinstance(r, kind)]

    def terminal(self, handle):
        """The terminal record of a handle, or None; more than one is an error."""
        found = self.of(handle, Finished) + self.of(handle, Errored)
        assert len(found) <= 1, "a handle ended twice"
        return found[0] if found else None

    async def until(self, reached, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            while not reached():
                self._news.clear()
                await self._news.wait()

    async def ended(self, handle, timeout_s=60):
        await self.until(lambda: self.terminal(handle) is not None, timeout_s)
        return self.terminal(handle)


__all__ = ["DecodeRig", "InProcessGateway", "NeedPrefill", "Started"]
