"""An engine without tensors: implements the three work Protocols of `engine.port`, moves only by `step`.

Tokens are a pure function of the sequence's tokens, so hand-over, resume and local runs can be compared.
`EngineOnThread` runs posted functions and steps on a thread of its own, `InlineEngine` on the caller's.
"""

import itertools
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.errors import NoCapacity, TandemError
from core.kv import PageRef
from core.lifecycle import State
from core.request import FinishReason, GenerateRequest, SamplingParams, StopRules, check_request
from core.worker import KvEvent, Load
from engine.events import ChunkFinal, FailedHere, FinishedHere, Prefilled, SeqId, StartedHere, StepEvents
from engine.port import Booking, LandingPages

PAGE_TOKENS = 4
VOCAB = 1000
EOS = 999


def next_token(token_ids) -> int:
    """The fake model: never EOS unless the sum says so."""
    return (sum(token_ids) * 31 + len(token_ids) * 7) % VOCAB


def reply(token_ids, max_tokens: int) -> list[int]:
    """What any correct worker answers to a prompt."""
    tokens, output = list(token_ids), []
    for _ in range(max_tokens):
        token = next_token(tokens)
        output.append(token)
        tokens.append(token)
        if token == EOS:
            break
    return output


def ask(token_ids, max_tokens=5, **changes) -> GenerateRequest:
    """Build a request."""
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "model": "fake",
        "token_ids": tuple(token_ids),
        "num_prompt_tokens": len(token_ids),
        "sampling": SamplingParams(temperature=0.0),
        "stop": StopRules(max_tokens=max_tokens),
    } | changes
    return GenerateRequest(**fields)


@dataclass
class _Seq:
    id: SeqId
    request: GenerateRequest
    deadline: float
    kind: str
    tokens: list[int] = field(default_factory=list)
    state: str = "waiting"
    pages: list[int] = field(default_factory=list)
    row: int = -1
    on_booked: Any = None

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens


class FakeEngine:
    """One engine; all calls from one thread."""

    def __init__(self, *, sink=None, rows=8, pages=64, max_tokens_total=200, prefix_tokens=0, cached_tokens=0) -> None:
        self.sink = sink
        self.prefix_tokens = prefix_tokens
        self.cached_tokens = cached_tokens
        self.max_tokens_total = max_tokens_total
        self.seqs: dict[SeqId, _Seq] = {}
        self.free_pages = set(range(1, pages + 1))
        self.unproven: set[int] = set()
        self.num_pages = pages
        self.free_rows = deque(range(rows))
        self.rows = rows
        self.refuse: TandemError | None = None
        self.commit_error: TandemError | None = None
        self.hold_landing = False
        self.valid_epochs = True
        self.aborted: list[SeqId] = []
        self.dropped: list[SeqId] = []
        self.committed: list[SeqId] = []
        self.kv_events: list[KvEvent] = []
        self._ids = itertools.count(1)
        self._waiting_land: list[tuple[_Seq, int, int, Any]] = []

    # LocalWork

    def submit(self, request, deadline):
        return self._add(request, deadline, "local").id

    def abort(self, seq):
        if seq in self.seqs:
            self.aborted.append(seq)
            if self.seqs[seq].state == "booked":
                self.seqs[seq].state = "abandoned"  # until the transfer says by `drop` what is still open
            else:
                self._end(self.seqs[seq])

    def load(self):
        return Load(
            state=State.READY,
            pages_total=self.num_pages,
            pages_free=len(self.free_pages),
            pages_evictable=0,
            rows_total=self.rows,
            rows_used=self.rows - len(self.free_rows),
            waiting_requests=sum(s.state in ("waiting", "booking") for s in self.seqs.values()),
            waiting_tokens=0,
            running_requests=sum(s.state == "running" for s in self.seqs.values()),
        )

    def audit(self):
        held = [p for s in self.seqs.values() for p in s.pages]
        found = []
        if len(held) + len(self.free_pages) + len(self.unproven) != self.num_pages:
            found.append("pages are lost or doubled")
        if self.seqs:
            found.append(f"{len(self.seqs)} sequences are left")
        return found

    # SourceWork

    def submit_source(self, request, deadline):
        return self._add(request, deadline, "source").id

    def release(self, seq):
        if seq in self.seqs:
            self._end(self.seqs[seq])

    def epochs_unchanged(self, seq):
        return self.valid_epochs and seq in self.seqs

    # DestinationWork

    def book(self, request, deadline, on_booked):
        seq = self._add(request, deadline, "booked")
        seq.state, seq.on_booked = "booking", on_booked
        self._serve_bookings()
        return seq.id

    def land(self, seq, start, end, on_pages):
        if seq not in self.seqs:
            on_pages(NoCapacity("the sequence ended"))
            return
        self._waiting_land.append((self.seqs[seq], start, end, on_pages))
        self._serve_landing()

    def commit(self, seq, first_tokens, logprobs, finish, num_cached_tokens, floors=None):
        if seq not in self.seqs:
            return
        if self.commit_error is not None:
            raise self.commit_error
        s = self.seqs[seq]
        self.committed.append(seq)
        s.tokens += first_tokens
        s.state = "running"
        if finish is not None:
            self._emit(finished=(self._finished(s, finish),))

    def drop(self, seq, open_pages):
        if seq not in self.seqs:
            return
        self.dropped.append(seq)
        s = self.seqs[seq]
        s.pages = [p for p in s.pages if p not in set(open_pages)]
        self.unproven |= set(open_pages)
        self._end(s)

    def prove(self, pages):
        assert set(pages) <= self.unproven
        self.unproven -= set(pages)
        self.free_pages |= set(pages)

    # Time

    def step(self):
        """Run one step: prefill what waits, one token for what runs."""
        seqs, positions, tokens, started, finished, chunks, prefilled = [], [], [], [], [], [], []
        for s in list(self.seqs.values()):
            if s.state == "waiting" and s.kind == "source":
                self._prefill(s, chunks, prefilled)
            elif s.state in ("waiting", "running"):
                if s.state == "waiting":
                    started.append(StartedHere(s.id, self.cached_tokens))
                    s.state = "running"
                token = next_token(s.tokens)
                seqs.append(s.id)
                positions.append(s.outputs)
                tokens.append(token)
                s.tokens.append(token)
                if token == EOS:
                    finished.append(self._finished(s, FinishReason.STOP))
                elif s.outputs >= s.request.stop.max_tokens:
                    finished.append(self._finished(s, FinishReason.LENGTH))
        kv_events, self.kv_events = tuple(self.kv_events), []
        self._emit(
            seqs=np.array(seqs, np.int64),
            positions=np.array(positions, np.int32),
            tokens=np.array(tokens, np.int32),
            started=tuple(started),
            finished=tuple(finished),
            chunks=tuple(chunks),
            prefilled=tuple(prefilled),
            kv_events=kv_events,
        )

    def fail(self, seq, error):
        """End a sequence badly, as a deadline would."""
        self._end(self.seqs[seq])
        self._emit(failed=(FailedHere(seq, error),))

    def _prefill(self, s, chunks, prefilled):
        count = len(s.tokens)
        s.pages = self._take(-(-count // PAGE_TOKENS))
        chunks.append(ChunkFinal(s.id, 0, count, tuple(PageRef(p, 1) for p in s.pages)))
        token = next_token(s.tokens)
        finish = FinishReason.STOP if token == EOS else None
        if s.outputs + 1 >= s.request.stop.max_tokens:
            finish = finish or FinishReason.LENGTH
        s.state = "held"
        prefilled.append(Prefilled(s.id, count, (token,), (), self.cached_tokens, finish, 0, 1))

    def _add(self, request, deadline, kind):
        if self.refuse is not None:
            raise self.refuse
        check_request(request, VOCAB, self.max_tokens_total)
        s = _Seq(SeqId(next(self._ids)), request, deadline, kind, list(request.token_ids))
        self.seqs[s.id] = s
        return s

    def _take(self, count):
        assert len(self.free_pages) >= count
        return [self.free_pages.pop() for _ in range(count)]

    def _serve_bookings(self):
        for s in self.seqs.values():
            if s.state == "booking" and self.free_rows:
                s.row, s.state = self.free_rows.popleft(), "booked"
                s.on_booked(Booking(s.id, self.prefix_tokens, s.row))

    def _serve_landing(self):
        if self.hold_landing:
            return
        waiting, self._waiting_land = self._waiting_land, []
        for s, start, end, on_pages in waiting:
            if s.id not in self.seqs:
                on_pages(NoCapacity("the sequence ended"))
                continue
            pages = self._take(-(-end // PAGE_TOKENS) - start // PAGE_TOKENS)
            s.pages += pages
            on_pages(LandingPages(s.id, start, end, tuple(pages)))

    def _finished(self, s, reason):
        self._end(s)
        return FinishedHere(s.id, reason, s.outputs, 0)

    def _end(self, s):
        del self.seqs[s.id]
        self.free_pages |= set(s.pages)
        s.pages = []
        if s.row >= 0:
            self.free_rows.append(s.row)
            s.row = -1
        self._serve_bookings()

    def _emit(self, **parts):
        events = StepEvents(**parts)
        if self.sink is not None and not events.is_empty:
            self.sink.emit(events)


class InlineEngine:
    """The bridge without a thread: functions run at once."""

    def __init__(self, engine) -> None:
        self.engine = engine

    async def call(self, fn):
        return fn(self.engine)

    def look(self, fn):
        return fn(self.engine)

    async def ready(self, grammar):
        assert not grammar

    def post(self, fn, *, always=False):
        fn(self.engine)


class EngineOnThread:
    """The bridge with a thread, which also steps while anything waits or runs."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self._jobs: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="fake-engine")

    def start(self):
        self._thread.start()

    async def call(self, fn):
        import asyncio

        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def run(engine):
            try:
                value = fn(engine)
            except TandemError as error:
                loop.call_soon_threadsafe(answer.set_exception, error)
            else:
                loop.call_soon_threadsafe(answer.set_result, value)

        self._jobs.put(run)
        return await answer

    async def ready(self, grammar):
        assert not grammar

    def look(self, fn):
        return fn(self.engine)

    def post(self, fn, *, always=False):
        self._jobs.put(fn)

    def stop(self):
        self._jobs.put(None)
        self._thread.join()

    def _work(self):
        while True:
            busy = any(s.state in ("waiting", "running") for s in self.engine.seqs.values())
            try:
                job = self._jobs.get(block=not busy)
            except queue.Empty:
                self.engine.step()
                continue
            if job is None:
                return
            job(self.engine)
