"""Fakes around core.rpc: a real server on loopback for fake services, and vocabulary with sensible values."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from core.handover import FromD, FromP
from core.ids import Handle, Incarnation, RequestId, WorkerId
from core.lifecycle import State
from core.request import GenerateRequest, SamplingParams, StopRules
from core.rpc.generate import SendFrame
from core.rpc.membership import Welcome
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.stream import FromGateway, StreamHello
from core.worker import KvEventBatch, Load, Registration, Role

SECRET = b"a secret for tests only"


def a_proof(name: str = "a" * 32, secret: bytes = SECRET) -> Proof:
    return Proof(secret, Incarnation(name))


@asynccontextmanager
async def serving(*add: Callable[[RpcServer], None], proof: Proof | None = None, port: int = 0) -> AsyncGenerator[str]:
    """A real gRPC server on loopback with the services that `add` adds; yields its host:port."""
    server = RpcServer(proof or a_proof("b" * 32))
    for each in add:
        each(server)
    bound = await server.start("127.0.0.1", port)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


def a_request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": RequestId("req-1"),
        "model": "scripted",
        "token_ids": (1, 2, 3),
        "num_prompt_tokens": 3,
        "sampling": SamplingParams(temperature=0.0),
        "stop": StopRules(max_tokens=8),
    }
    return GenerateRequest(**{**fields, **changes})


def a_registration(**changes: object) -> Registration:
    fields: dict[str, object] = {
        "worker_id": WorkerId("decode-0"),
        "incarnation": Incarnation("d" * 32),
        "role": Role.DECODE,
        "model": "scripted",
        "address": "127.0.0.1:1",
        "http_address": "127.0.0.1:2",
        "namespace": b"namespace",
        "fingerprint": b"f" * 32,
        "secret_check": b"",
        "page_tokens": 16,
        "num_pages": 64,
        "num_rows": 8,
        "max_tokens_total": 1024,
        "vocab_size": 256,
        "eos_token_ids": (0,),
    }
    return Registration(**{**fields, **changes})


def a_load(**changes: object) -> Load:
    fields: dict[str, object] = {
        "state": State.READY,
        "pages_total": 63,
        "pages_free": 60,
        "pages_evictable": 3,
        "rows_total": 8,
        "rows_used": 0,
        "waiting_requests": 0,
        "waiting_tokens": 0,
        "running_requests": 0,
    }
    return Load(**{**fields, **changes})


def a_hello(**changes: object) -> StreamHello:
    fields: dict[str, object] = {"gateway": Incarnation("a" * 32), "worker": Incarnation("d" * 32)}
    return StreamHello(**{**fields, **changes})


class GenerateProbe:
    """A GenerateService that records what arrives and lets a test send frames; `refusal` is raised on connect."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.hellos: list[StreamHello] = []
        self.frames: asyncio.Queue[FromGateway] = asyncio.Queue()
        self.send: asyncio.Queue[SendFrame] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        """``closed`` (frames ended) or ``broken`` (cancelled), once per stream."""

    async def connect(self, hello: StreamHello, frames: AsyncIterator[FromGateway], send: SendFrame) -> None:
        self.hellos.append(hello)
        if self.refusal is not None:
            raise self.refusal
        await self.send.put(send)
        how = "broken"
        try:
            async for frame in frames:
                await self.frames.put(frame)
            how = "closed"
        finally:
            self.ended.put_nowait(how)


class SourceProbe:
    """A KvSourceService whose links answer by a function: message -> answers, or raises."""

    def __init__(self, answer: Callable[[FromD], list[FromP]]) -> None:
        self.answer = answer
        self.handled: list[FromD] = []
        self.send: list[Callable[[FromP], None]] = []
        self.closed_links: asyncio.Queue[int] = asyncio.Queue()

    def open_link(self, send: Callable[[FromP], None]) -> "SourceProbeLink":
        self.send.append(send)
        return SourceProbeLink(self, len(self.send) - 1)


class SourceProbeLink:
    def __init__(self, source: SourceProbe, number: int) -> None:
        self.source = source
        self.number = number

    async def handle(self, message: FromD) -> None:
        self.source.handled.append(message)
        for answer in self.source.answer(message):
            self.source.send[self.number](answer)

    def closed(self) -> None:
        self.source.closed_links.put_nowait(self.number)


class RecordingMembership:
    """A gateway's membership that records: `log` holds (what, incarnation, detail); `seen` signals every entry."""

    def __init__(
        self,
        gateway: str = "9" * 32,
        siblings: tuple[str, ...] = (),
        ttl_s: float = 3.0,
        refusal: Exception | None = None,
    ) -> None:
        self.welcome = Welcome(gateway=Incarnation(gateway), siblings=siblings, ttl_s=ttl_s)
        self.refusal = refusal
        self.registrations: list[Registration] = []
        self.loads: list[Load] = []
        self.batches: list[KvEventBatch] = []
        self.log: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def joined(self, registration: Registration) -> Welcome:
        self.registrations.append(registration)
        self._note("refused" if self.refusal else "joined", registration.incarnation)
        if self.refusal is not None:
            raise self.refusal
        return self.welcome

    def heartbeat(self, incarnation: Incarnation, load: Load) -> None:
        self.loads.append(load)
        self._note("heartbeat", incarnation)

    def events(self, incarnation: Incarnation, batch: KvEventBatch) -> None:
        self.batches.append(batch)
        self._note("events", incarnation)

    def left(self, incarnation: Incarnation, reason: str) -> None:
        self._note(f"left: {reason}", incarnation)

    def lost(self, incarnation: Incarnation) -> None:
        self._note("lost", incarnation)

    def _note(self, what: str, incarnation: str) -> None:
        self.log.append((what, incarnation))
        self._changed.set()

    def count(self, what: str) -> int:
        return sum(entry[0] == what for entry in self.log)

    async def until(self, what: str, times: int = 1) -> None:
        """Wait until `what` was noted `times` times."""
        while self.count(what) < times:
            self._changed.clear()
            await self._changed.wait()


HANDLE = Handle(7)
