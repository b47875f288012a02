"""The engine of one worker: everything a scheduler thread owns, behind the three Protocols of `engine.port`.

The same class on every worker: what it does follows from what it is asked (`submit`, `submit_source`, `book`). The
step loop drives it through `poll`, `plan`, `process` and `take_events`. Knows no tensors, threads or network.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np

from core.clock import Clock
from core.errors import Aborted, BadRequest, DeadlineExceeded, InvariantError, TandemError
from core.handover import TokenLogprobs
from core.hashing import PageHasher
from core.ids import Incarnation
from core.kv import KVLayout
from core.lifecycle import State
from core.request import FinishReason, Floors, GenerateRequest, check_request
from core.worker import KvSnapshot, Load
from engine.cache.page_state import PageState
from engine.cache.tier import NullTier, TierPort
from engine.config import EngineConfig, TokenFacts, plan_capacity
from engine.events import SeqId, StepEvents
from engine.images import check_images
from engine.plan import Plan, StepResult
from engine.port import Booking, LandingPages
from engine.scheduler.admission import Admission
from engine.scheduler.departures import Departures
from engine.scheduler.draft_book import DraftBook
from engine.scheduler.growth import Growth, SpeculativeGrowth
from engine.scheduler.holdings import Holdings
from engine.scheduler.landing import Landing
from engine.scheduler.outbox import Outbox
from engine.scheduler.planner import Planner
from engine.scheduler.results import Results
from engine.scheduler.row_table import RowState
from engine.scheduler.runs import RunResults
from engine.scheduler.sources import Sources
from engine.sequence import SeqState, Sequence

NO_DRAFTS = {"drafts_verified": 0, "drafts_accepted": 0}
"""Counters of an engine whose model has no drafter: the metrics exist all the same."""


class Engine:
    """LocalWork, SourceWork and DestinationWork over one pool of rows and pages. Scheduler thread only."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        facts: TokenFacts,
        layout: KVLayout,
        hasher: PageHasher,
        clock: Clock,
        tier: TierPort | None = None,
        num_drafts: int = 0,
    ) -> None:
        self.config = config
        self.capacity = plan_capacity(config, layout, facts.max_positions)
        self._facts = facts
        self._images = facts.images if config.images else None
        self._clock = clock
        self._holdings = Holdings(
            config=config,
            capacity=self.capacity,
            layout=layout,
            facts=facts,
            hasher=hasher,
            tier=tier if tier is not None else NullTier(),
        )
        self._outbox = Outbox()
        self._sources = Sources(self._holdings, self._outbox)
        self._admission = Admission(self._holdings, self._sources)
        self._departures = Departures(self._holdings, self._admission, self._outbox)
        self._landing = Landing(self._holdings, self._departures)
        shared = (self._holdings, self._admission, self._sources, self._departures, self._outbox)
        growth, self._drafts, self._results = Growth(self._holdings, self._departures), None, Results(*shared)
        if num_drafts:
            by_confidence = config.speculation.mode == "confidence"
            self._drafts = DraftBook(self._holdings.rows, num_drafts, by_confidence=by_confidence)
            growth = SpeculativeGrowth(self._holdings, self._departures, num_drafts)
            self._results = RunResults(*shared, drafts=self._drafts)
        self._planner = Planner(self._holdings, self._admission, self._landing, growth, self._drafts)

    # LocalWork

    def submit(self, request: GenerateRequest, deadline: float) -> SeqId:
        self._check(request)
        seq = self._create(request, deadline, SeqState.WAITING)
        reason = self._ended_already(request)
        if reason is not None:
            self._holdings.forget(seq)
            self._outbox.finished(seq, reason, request.num_output_tokens)
        else:
            self._admission.enqueue(seq, self._clock.now())
        return seq.id

    def abort(self, seq: SeqId) -> None:
        record = self._holdings.sequences.get(seq)
        if record is None or record.state is SeqState.ABANDONED:
            return
        if record.state in (SeqState.BOOKED, SeqState.LANDING):
            self._landing.abandon(record)
        elif record.state is SeqState.BOOKING:
            self._departures.fail(record, Aborted("the request was aborted before it was booked"))
        else:
            self._departures.end(record)

    def load(self) -> Load:
        holdings, rows, meter = self._holdings, self._holdings.rows, self._results.meter
        prefilling = rows.in_state(RowState.PREFILLING)
        begun = int((rows.goal[prefilling] - rows.committed[prefilling]).sum())
        return Load(
            state=State.READY,
            pages_total=self.capacity.usable_pages,
            pages_free=holdings.pool.num_free + holdings.pool.num_fenced,
            pages_evictable=holdings.tree.num_evictable,
            rows_total=rows.num_rows,
            rows_used=rows.num_used,
            waiting_requests=self._admission.num_waiting,
            waiting_tokens=self._admission.waiting_tokens + begun,
            running_requests=rows.count(RowState.RUNNING),
            step_ms=meter.step_s * 1000,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            unproven_pages=holdings.pool.num_unproven,
        )

    def audit(self) -> list[str]:
        return self._holdings.audit()

    # SourceWork

    def submit_source(self, request: GenerateRequest, deadline: float) -> SeqId:
        self._check(request, wants_output=True)
        seq = self._create(request, deadline, SeqState.WAITING, is_source=True)
        self._admission.enqueue(seq, self._clock.now())
        return seq.id

    def release(self, seq: SeqId) -> None:
        self.abort(seq)

    def epochs_unchanged(self, seq: SeqId) -> bool:
        record = self._holdings.sequences.get(seq)
        return record is not None and self._sources.epochs_unchanged(record)

    # DestinationWork

    def book(
        self, request: GenerateRequest, deadline: float, on_booked: Callable[[Booking | TandemError], None]
    ) -> SeqId:
        self._check(request, wants_output=True)
        seq = self._create(request, deadline, SeqState.BOOKING)
        seq.on_booked = on_booked
        self._admission.enqueue_booking(seq, self._clock.now())
        return seq.id

    def land(self, seq: SeqId, start: int, end: int, on_pages: Callable[[LandingPages | TandemError], None]) -> None:
        self._landing.land(seq, start, end, on_pages)

    def commit(
        self,
        seq: SeqId,
        first_tokens: Listing[int],
        logprobs: Listing[TokenLogprobs],  # noqa: ARG002 (the worker told them to the client at FINAL)
        finish: FinishReason | None,
        num_cached_tokens: int,
        *,
        floors: Floors | None = None,
    ) -> None:
        self._landing.commit(seq, first_tokens, finish, num_cached_tokens, floors=floors)

    def drop(self, seq: SeqId, open_pages: Listing[int]) -> None:
        self._landing.drop(seq, open_pages)

    def prove(self, pages: Listing[int]) -> None:
        self._landing.prove(pages)

    # The step loop's hooks, in the order of a pass.

    def poll(self) -> None:
        """End whoever's deadline has passed."""
        now, rows = self._clock.now(), self._holdings.rows
        late = self._admission.expired(now) if self._admission.num_waiting else []
        late += [self._holdings.sequences[SeqId(seq)] for seq in rows.seq[rows.deadline <= now].tolist()]
        for seq in late:
            self._departures.fail(seq, DeadlineExceeded("the request's deadline passed before it was done"))

    def plan(self) -> Plan | None:
        """Return the next step, or None if there is nothing to compute."""
        return self._planner.plan(self._clock.now())

    def empty_plan(self) -> Plan:
        """Return a step without rows: another rank of the group has work and all launch together."""
        return self._planner.empty()

    def process(self, plan: Plan, result: StepResult) -> None:
        """Take in a step's result. Raises `InvariantError` if the audit, when due, finds anything."""
        self._results.process(plan, result)
        every = self.config.audit_every_steps
        if every and plan.step % every == 0 and (found := self.audit()):
            raise InvariantError("; ".join(found))

    @property
    def has_chunks(self) -> bool:
        """True if announcements wait that a destination could use at once."""
        return self._outbox.has_chunks

    def take_events(self) -> StepEvents:
        """Return what happened since the last call."""
        return self._outbox.take(self._holdings.recorder.drain())

    # Beside the Protocols.

    def kv_snapshot(self, incarnation: Incarnation) -> KvSnapshot:
        """Return all cached pages as of the last event batch that was taken."""
        return self._holdings.recorder.snapshot(incarnation)

    def flush_cache(self) -> None:
        """Forget all cached prefixes; pages in use follow when they are given back."""
        self._holdings.pool.free(self._holdings.tree.flush(), self._holdings.launched)

    def free_pages(self) -> int:
        """Return the pages that nobody holds, cached ones included."""
        return self._holdings.num_free_or_evictable

    def statistics(self) -> dict[str, int | float]:
        """Return counters and gauges by name."""
        holdings, meter = self._holdings, self._results.meter
        pages = {f"pages_{state.name.lower()}": holdings.pool.count(state) for state in PageState}
        living = sum(seq.recomputed_tokens for seq in holdings.sequences.values())
        return {
            **pages,
            "pages_evictable": holdings.tree.num_evictable,
            "pages_promised": holdings.promised_pages,
            "rows_used": holdings.rows.num_used,
            "sequences": len(holdings.sequences),
            "waiting": self._admission.num_waiting,
            "steps": meter.steps,
            "prefill_tokens": meter.prefill_tokens,
            "decode_tokens": meter.decode_tokens,
            "cached_tokens": meter.cached_tokens,
            "replayed_tokens": meter.replayed_tokens,
            "recomputed_tokens": self._departures.recomputed_tokens + living,
            "retractions": self._departures.num_retractions,
            **(self._drafts.statistics() if self._drafts is not None else NO_DRAFTS),
        }

    def post_mortem(self) -> list[str]:
        """Return the last operations, newest last, for the log of a crash."""
        return [
            f"step {step} {operation} sequence {seq} {detail}" for step, operation, seq, detail in self._holdings.log
        ]

    # Ingress.

    def _check(self, request: GenerateRequest, *, wants_output: bool = False) -> None:
        check_request(request, self._facts.vocab_size, self.capacity.max_tokens_total)
        self._holdings.chains.check(request)
        if request.sampling.prompt_logprobs:
            raise BadRequest("log-probabilities of the prompt are not supported", param="prompt_logprobs")
        check_images(request, self._images)
        if wants_output and self._ended_already(request) is not None:
            raise BadRequest("the request has all its output tokens already", param="max_tokens")
        self._admission.check_room(self._results.meter.prefill_tokens_per_s)

    def _ended_already(self, request: GenerateRequest) -> FinishReason | None:
        """Return why a resumed request needs no further token, or None."""
        if not request.num_output_tokens:
            return None
        return self._holdings.limits.finish_after(request, len(request.token_ids), request.token_ids[-1])

    def _create(
        self, request: GenerateRequest, deadline: float, state: SeqState, *, is_source: bool = False
    ) -> Sequence:
        if np.isnan(deadline):
            raise InvariantError("a deadline is not a number")
        return self._holdings.create(request, deadline, state, is_source=is_source)
