"""A simulated decode worker: the real Generate contract, tokens from a pure function, behaviour from a plan.

No torch, no KV. Frames are numbered, kept until acknowledged and replayed on re-attachment, one a step and gateway.
A plan is a list of actions per request; when it is used up the request runs to its end. Actions:

``("tokens", n)`` emit n tokens; ``("wait", n)`` do nothing for n steps; ``("repeat", n)`` send the last n again;
``("skip", n)`` lose n tokens; ``("error", code)``; ``("need", code)`` lose the prefill worker and wait for Place;
``("break",)`` drop the connection once; ``("die",)`` stop serving for good; ``("stop",)`` end with reason stop;
``("vanish",)`` send the last token and die before the goodbye.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from core.errors import WorkerLost
from core.handover import TokenLogprobs
from core.request import Floors, GenerateRequest
from core.stream import (
    AbortRequest,
    Ack,
    Errored,
    Finished,
    Logprobs,
    NeedPrefill,
    Place,
    Started,
    StepFrame,
    StreamHello,
    Submit,
)

VOCAB = 400
EOS = 2


def sim_token(prompt: Sequence[int], position: int) -> int:
    """Output token at `position`: depends on prompt and position alone; never the end-of-text id."""
    return 3 + (sum(prompt) * 31 + len(prompt) * 7 + position * 7919) % (VOCAB - 3)


def sim_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [sim_token(prompt, position) for position in range(num_tokens)]


@dataclass
class SimRequest:
    handle: int
    request: GenerateRequest
    prefill: str
    plan: deque
    position: int
    started: bool = False
    wants_place: bool = False
    wait: int = 0

    @property
    def prompt(self):
        return self.request.token_ids[: self.request.num_prompt_tokens]


@dataclass
class Session:
    """One gateway incarnation: its requests, its numbered frames, its present connection."""

    requests: dict = field(default_factory=dict)
    sequence: int = 0
    unacknowledged: deque = field(default_factory=deque)
    outbox: asyncio.Queue | None = None


class SimDecode:
    """Implements `core.rpc.generate.GenerateService`. `plan(submit)` gives each request's actions."""

    def __init__(
        self,
        incarnation: str,
        *,
        plan: Callable[[Submit], Sequence[tuple]] = lambda submit: (),
        step_s: float = 0.0,
        tokens_per_step: int = 1,
        die: Callable[[], None] | None = None,
        keep_frames: bool = True,
    ):
        self.incarnation = incarnation
        self.plan = plan
        self.step_s = step_s
        self.tokens_per_step = tokens_per_step
        self.sessions: dict[str, Session] = {}
        self.dead = False
        self.draining = False
        self.counts = dict.fromkeys(
            ("submits", "aborts", "places", "steps", "frames", "tokens", "refused", "resumes", "local"), 0
        )
        self.on_prompt: Callable[[GenerateRequest], None] = lambda request: None
        self._die = die
        self._keep_frames = keep_frames
        self._work = asyncio.Event()
        self._breaks = 0

    # Contract

    async def connect(self, hello: StreamHello, frames, send):
        if self.dead or hello.worker != self.incarnation:
            raise WorkerLost(f"incarnation {hello.worker} does not live here")
        session = self._session(hello)
        outbox = session.outbox = asyncio.Queue()
        for frame in session.unacknowledged:
            outbox.put_nowait(frame)
        sender = asyncio.create_task(self._send_all(outbox, send))
        try:
            async for frame in frames:
                self._command(session, frame)
            session.requests.clear()  # the gateway closed in order
        finally:
            if session.outbox is outbox:
                session.outbox = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    def _session(self, hello):
        if hello.resume_after < 0:
            self.sessions[hello.gateway] = Session()
        elif hello.gateway not in self.sessions or not self._keep_frames:
            raise WorkerLost("nothing is kept of that stream")
        session = self.sessions[hello.gateway]
        while session.unacknowledged and session.unacknowledged[0].sequence <= hello.resume_after:
            session.unacknowledged.popleft()
        return session

    @staticmethod
    async def _send_all(outbox, send):
        while True:
            await send(await outbox.get())

    def _command(self, session, frame):
        match frame:
            case Submit():
                self._submit(session, frame)
            case AbortRequest():
                self.counts["aborts"] += session.requests.pop(frame.handle, None) is not None
            case Place():
                request = session.requests.get(frame.handle)
                if request is not None and request.wants_place:
                    request.wants_place = False
                    request.prefill = frame.prefill.worker_id if frame.prefill else ""
                    self.counts["places"] += 1
            case Ack():
                while session.unacknowledged and session.unacknowledged[0].sequence <= frame.sequence:
                    session.unacknowledged.popleft()
        self._work.set()

    def _submit(self, session, submit):
        request = submit.request
        self.counts["submits"] += 1
        self.counts["resumes"] += request.num_output_tokens > 0
        self.counts["local"] += submit.prefill is None
        prompt = request.token_ids[: request.num_prompt_tokens]
        plan = deque(self.plan(submit))
        if list(request.token_ids[request.num_prompt_tokens :]) != sim_answer(prompt, request.num_output_tokens):
            plan = deque([("error", "invariant")])
        if self.draining:
            plan = deque([("error", "draining")])
            self.counts["refused"] += 1
        assert submit.handle not in session.requests, "a handle was used twice"
        session.requests[submit.handle] = SimRequest(
            handle=submit.handle,
            request=request,
            prefill=submit.prefill.worker_id if submit.prefill else "",
            plan=plan,
            position=request.num_output_tokens,
        )

    # Steps

    @property
    def running(self) -> int:
        return sum(len(session.requests) for session in self.sessions.values())

    async def run(self):
        """Step for ever; one frame a step and session, only if there is something to say."""
        while not self.dead:
            if not self.running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.step_s)
            self.counts["steps"] += 1
            for session in list(self.sessions.values()):
                self._step(session)
                if self.dead:
                    return

    def _step(self, session):
        handles, positions, counts, tokens, records = [], [], [], [], []
        breaks = dies = False
        for request in list(session.requests.values()):
            run, more, ended, order = self._advance(request)
            if run:
                handles.append(request.handle)
                positions.append(run[0])
                counts.append(len(run[1]))
                tokens.extend(run[1])
                if request.request.sampling.num_logprobs >= 0:
                    items = tuple(TokenLogprobs(token=token, logprob=-0.5) for token in run[1])
                    records.append(Logprobs(handle=request.handle, items=items))
            records.extend(more)
            breaks |= order == "break"
            dies |= order == "die"
            if ended:
                session.requests.pop(request.handle, None)
        if handles or records:
            session.sequence += 1
            self.counts["frames"] += 1
            self.counts["tokens"] += len(tokens)
            frame = StepFrame(
                sequence=session.sequence,
                handles=handles,
                positions=positions,
                counts=counts,
                tokens=tokens,
                records=tuple(records),
            )
            session.unacknowledged.append(frame)
            if session.outbox is not None:
                session.outbox.put_nowait(frame)
        if breaks and session.outbox is not None:
            session.outbox.put_nowait(BREAK)
        if dies:
            self.kill()

    def kill(self):
        self.dead = True
        for session in self.sessions.values():
            if session.outbox is not None:
                session.outbox.put_nowait(BREAK)
        if self._die is not None:
            self._die()

    def _advance(self, request):
        """Return (run of tokens or None, records, ended, order to the connection)."""
        if request.wants_place:
            return None, (), False, ""
        kind, *rest = request.plan[0] if request.plan else ("tokens", 1 << 30)
        if kind == "wait":
            self._count_down(request, rest[0], 1)
            return None, (), False, ""
        if kind == "need":
            request.plan.popleft()
            if not request.prefill:
                return None, (), False, ""
            request.wants_place = True
            need = NeedPrefill(handle=request.handle, failed=request.prefill, code=rest[0], message="planned")
            return None, (need,), False, ""
        if kind == "error":
            error = Errored(handle=request.handle, code=rest[0], message="planned")
            return None, (error,), True, ""
        if kind in ("break", "die"):
            request.plan.popleft()
            return None, (), False, kind
        records = self._start(request)
        if kind == "stop":
            done = Finished(handle=request.handle, reason="stop", num_output_tokens=request.position)
            return None, (*records, done), True, ""
        if kind == "repeat":
            request.plan.popleft()
            first = max(request.request.num_output_tokens, request.position - rest[0])
            again = [sim_token(request.prompt, at) for at in range(first, request.position)]
            return ((first, again) if again else None), records, False, ""
        left = request.request.stop.max_tokens - request.position
        if kind == "skip":
            request.plan.popleft()
            request.position += min(rest[0], max(0, left - 1))
            return None, records, False, ""
        count = left if kind == "vanish" else min(self.tokens_per_step, left, rest[0])
        run = (request.position, [sim_token(request.prompt, request.position + at) for at in range(count)])
        request.position += count
        if kind == "vanish":
            return run, records, False, "die"
        if request.plan:
            self._count_down(request, rest[0], count)
        if request.position < request.request.stop.max_tokens:
            return run, records, False, ""
        done = Finished(handle=request.handle, reason="length", num_output_tokens=request.position)
        return run, (*records, done), True, ""

    @staticmethod
    def _count_down(request, total, done):
        if total - done > 0:
            request.plan[0] = (request.plan[0][0], total - done)
        else:
            request.plan.popleft()

    def _start(self, request):
        if request.started:
            return ()
        request.started = True
        self.on_prompt(request.request)
        cached = request.request.num_cached_tokens
        pulled = 100 * len(request.request.token_ids) if request.prefill else 0
        return (
            Started(
                handle=request.handle,
                num_cached_tokens=cached if cached >= 0 else 5,
                prefill_worker=request.prefill,
                bytes_pulled=pulled,
                floors=request.request.floors or Floors(encoder_floor=1, decoder_floor=2, hits=(2,)),
            ),
        )


BREAK = object()


class LocalStream:
    """A connection to a `SimDecode` without a network; breaks like one."""

    def __init__(self, worker: SimDecode, hello: StreamHello):
        self._worker = worker
        self._out: asyncio.Queue = asyncio.Queue()
        self._in: asyncio.Queue = asyncio.Queue()
        self._task = asyncio.create_task(self._serve(hello))
        self.accepted = asyncio.get_running_loop().create_future()
        self.broken = False

    async def _serve(self, hello):
        try:
            await self._worker.connect(hello, self._commands(), self._take)
        except WorkerLost as error:
            if not self.accepted.done():
                self.accepted.set_exception(error)
        except ConnectionResetError:
            pass
        finally:
            self.broken = True
            self._in.put_nowait(None)

    async def _commands(self):
        if not self.accepted.done():
            self.accepted.set_result(None)
        while True:
            frame = await self._out.get()
            if frame is BREAK:
                raise ConnectionResetError
            if frame is None:
                return
            yield frame

    async def _take(self, frame):
        if frame is BREAK:
            self._out.put_nowait(BREAK)
        else:
            self._in.put_nowait(frame)

    def post(self, frame):
        if self.broken:
            raise WorkerLost("the connection is lost")
        self._out.put_nowait(frame)

    async def frames(self) -> AsyncIterator[StepFrame]:
        while True:
            frame = await self._in.get()
            if frame is None:
                raise WorkerLost("the connection is lost")
            yield frame

    async def close(self):
        self._out.put_nowait(None)
        await asyncio.gather(self._task, return_exceptions=True)


class LocalOpener:
    """Opens `LocalStream`s to workers by address."""

    def __init__(self):
        self.workers: dict[str, SimDecode] = {}
        self.opened = 0

    async def open(self, address, hello, timeout_s=3.0):
        worker = self.workers.get(address)
        if worker is None or worker.dead:
            raise WorkerLost(f"no connection to {address}")
        self.opened += 1
        stream = LocalStream(worker, hello)
        await stream.accepted
        return stream
