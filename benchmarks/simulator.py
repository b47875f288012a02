"""Simulates prefill workers behind the gateway's own routing: directory, index, placer, policies and dispatches.

Each worker serves prompts one after another with a least-recently-used cache of blocks; a prompt needs
0.02 + u/12000 + 1.2e-9 * u * (n - u/2) seconds, u of its n tokens being new. KV events and load reports arrive late.
Decoding takes 20 ms a token and has room for all. Deterministic by its seed. What it leaves out: chunked prefill
shared by prompts, transfers, failures other than restarts.
"""

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.traces import BLOCK_TOKENS, Trace, Turn
from core.clock import ManualClock
from core.ids import Incarnation, WorkerId
from core.lifecycle import State
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Load, Registration, Role
from gateway.directory import Directory, Member
from gateway.dispatch import Dispatch, decay_recent
from gateway.placer import HashedPages, Pair, Placer, Query
from gateway.prefix_index import Applied, PrefixIndex
from gateway.routing.job import RoutingRules
from gateway.routing.picker import Picker

BASE_S, TOKEN_S, SQUARE_S = 0.02, 1 / 12_000, 1.2e-9
STEP_S = 0.02
MODEL, FINGERPRINT = "sim", b"sim"
GATE_POLL_S = 0.25
ORACLE = "oracle"
"""Not a policy of the product: true caches and true queues, the earliest end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated."""

    workers: int
    cache_blocks: int = 2000
    lag_s: float = 0.05
    """KV events reach the gateway so much later."""
    report_s: float = 1.0
    gateways: int = 1
    restarts: tuple[float, ...] = ()
    """At each of these times the next worker loses its cache and comes back as another incarnation."""
    has_events: bool = True
    """False: the gateway knows caches by its own dispatches only."""
    noise: float = 0.0
    """Relative deviation of service times."""
    seed: int = 1


@dataclass(slots=True, eq=False)
class _Arrived:
    turn: Turn
    at: float
    gateway: "_Gateway"
    dispatch: Dispatch | None = None
    placed_at: float = 0.0
    predicted_s: float = 0.0


class _Worker:
    """One prefill worker: a queue, a cache, and the events it owes."""

    def __init__(self, number: int, cache_blocks: int) -> None:
        self.number = number
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.queue: deque[_Arrived] = deque()
        self.serving: _Arrived | None = None
        self.until = 0.0
        self.busy_s = 0.0
        self.served_tokens = 0
        self.generation = 0
        self.sequence = 0
        self._capacity = cache_blocks

    def registration(self) -> Registration:
        return _registration(f"p{self.number}", Role.PREFILL, self._capacity, 64, f"{self.generation}")

    def cached_tokens(self, turn: Turn) -> int:
        """Leading prompt tokens in the cache, the last prompt token never."""
        held = 0
        for block in turn.blocks:
            if block not in self.cache:
                break
            held += 1
        return min(held * BLOCK_TOKENS, turn.num_tokens - 1)

    def keep(self, turn: Turn) -> KvEventBatch:
        """Put its blocks into the cache, deepest as the oldest; return what changed."""
        stored = tuple(block for block in turn.blocks if block not in self.cache)
        for block in reversed(turn.blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        removed = tuple(self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self._capacity))
        self.sequence += 1
        events = (KvEvent(kind="stored", hashes=stored), KvEvent(kind="removed", hashes=removed))
        return KvEventBatch(sequence=self.sequence, events=events)


class _Gateway:
    """One gateway process: the product's routing, nothing else."""

    def __init__(self, rules: RoutingRules, clock: ManualClock, seed: int) -> None:
        self.directory = Directory(clock, ttl_s=1e9)
        self.index = PrefixIndex()
        picker = Picker(random.Random(seed))
        self.placer = Placer(directory=self.directory, index=self.index, rules=rules, picker=picker, clock=clock)
        decode, _ = self.directory.join(_registration("d0", Role.DECODE, 1 << 30, 1 << 30, "0"))
        self.directory.heartbeat(decode, _load(0, 0, 1 << 30))
        self.members: dict[int, Member] = {}

    def join(self, worker: _Worker, *, has_events: bool) -> None:
        told = worker.registration()
        old = self.members.get(worker.number)
        if old is not None:
            self.directory.deregister(old)
            self.index.drop(old.slot)
        member, _ = self.directory.join(told)
        self.directory.heartbeat(member, _load(0, 0, told.num_pages))
        self.index.add(member.slot, told.incarnation, told.num_pages)
        if has_events:
            empty = KvSnapshot(incarnation=told.incarnation, sequence=0, hashes=())
            self.index.apply_snapshot(member.slot, empty)
        self.members[worker.number] = member


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Times in seconds."""

    hit_share: float
    """Of all prompt tokens, those found in the cache."""
    ttft: Sequence[float]
    """From arrival (of the turn) to the end of prefill, by order of ending."""
    load_spread: float
    """Largest share of busy time over the mean."""
    end_s: float
    error_ratio: Sequence[float]
    """Predicted over measured seconds from dispatch to the end of prefill."""
    index_bytes: int
    index_pages: int

    def summary(self) -> Mapping[str, float]:
        """Return the figures of a record."""
        ttft, ratio = np.array(self.ttft), np.array(self.error_ratio)
        return {
            "hit_percent": round(100 * self.hit_share, 2),
            "ttft_mean_s": round(float(ttft.mean()), 3),
            "ttft_p50_s": round(float(np.percentile(ttft, 50)), 3),
            "ttft_p90_s": round(float(np.percentile(ttft, 90)), 3),
            "ttft_p99_s": round(float(np.percentile(ttft, 99)), 3),
            "max_over_mean_load": round(self.load_spread, 3),
            "end_s": round(self.end_s, 1),
            "predicted_over_measured_p50": round(float(np.median(ratio)), 3) if len(ratio) else 0.0,
        }


@dataclass(slots=True)
class Simulation:
    """Runs one trace through one scene by one set of rules; `oracle` replaces the product's choice."""

    trace: Trace
    scene: Scene
    rules: RoutingRules
    oracle: bool = False
    on_report: Callable[["Simulation"], None] | None = None
    """Called with each round of load reports."""
    gateways: list[_Gateway] = field(init=False)
    clock: ManualClock = field(init=False, default_factory=ManualClock)
    _workers: list[_Worker] = field(init=False)
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(init=False, default_factory=list)
    _numbers: "itertools.count[int]" = field(init=False, default_factory=itertools.count)
    _random: random.Random = field(init=False)
    _left: int = field(init=False, default=0)
    _ttft: list[float] = field(init=False, default_factory=list)
    _ratios: list[float] = field(init=False, default_factory=list)
    _hit: int = field(init=False, default=0)
    _next: dict[tuple[int, int], Turn] = field(init=False, default_factory=dict)

    def run(self) -> Outcome:
        """Return what came of it."""
        scene = self.scene
        self._random = random.Random(scene.seed)
        self._workers = [_Worker(number, scene.cache_blocks) for number in range(scene.workers)]
        self.gateways = [_Gateway(self.rules, self.clock, scene.seed + n) for n in range(scene.gateways)]
        for gateway, worker in itertools.product(self.gateways, self._workers):
            gateway.join(worker, has_events=scene.has_events)
        self._schedule()
        now = 0.0
        while self._left:
            at, _, act, arguments = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at - now))
            now = max(now, at)
            act(*arguments)
        busy = [worker.busy_s for worker in self._workers]
        return Outcome(
            hit_share=self._hit / sum(turn.num_tokens for turn in self.trace.turns),
            ttft=self._ttft,
            load_spread=max(busy) * len(busy) / sum(busy),
            end_s=now,
            error_ratio=self._ratios,
            index_bytes=self.gateways[0].index.nbytes,
            index_pages=len(self.gateways[0].index),
        )

    def _schedule(self) -> None:
        self._left = len(self.trace.turns)
        for turn, following in itertools.pairwise((*self.trace.turns, None)):
            assert turn is not None
            if turn.is_first or not self.trace.closed:
                self._at(turn.at, self._arrive, turn)
            if self.trace.closed and following is not None and not following.is_first:
                self._next[turn.session, turn.num_tokens] = following
        for number, moment in enumerate(self.scene.restarts):
            self._at(moment, self._restart, self._workers[number % len(self._workers)])
        self._at(self.scene.report_s, self._report)

    def _at(self, at: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act, arguments))

    # What happens

    def _arrive(self, turn: Turn) -> None:
        self._admit(_Arrived(turn, self.clock.now(), self._random.choice(self.gateways)))

    def _admit(self, one: _Arrived) -> None:
        session = str(one.turn.session) if self.trace.closed else ""
        if not one.gateway.placer.begin(MODEL, session, one.turn.num_tokens):
            self._at(self.clock.now() + GATE_POLL_S, self._admit, one)
            return
        pages = (HashedPages(FINGERPRINT, BLOCK_TOKENS, one.turn.blocks),)
        query = Query(
            request_id="",
            model=MODEL,
            num_tokens=one.turn.num_tokens,
            max_output=one.turn.output_tokens,
            pages=pages,
            session=session,
        )
        found = one.gateway.placer.place(query)
        assert isinstance(found, Pair), found
        assert found.prefill is not None
        worker = self._truly_best(one.turn) if self.oracle else self._worker_of(one.gateway, found.prefill)
        tokens = max(1, one.turn.num_tokens - found.choice.matched_prefill)
        one.placed_at, one.predicted_s = self.clock.now(), found.choice.wait_s
        one.dispatch = Dispatch(
            one.gateway.directory,
            prefill=one.gateway.members[worker.number],
            decode=found.decode,
            tokens=tokens,
            seconds=found.choice.prefill_s,
            context=one.turn.num_tokens,
        )
        worker.queue.append(one)
        self._serve(worker)

    def _serve(self, worker: _Worker) -> None:
        if worker.serving is not None or not worker.queue:
            return
        one = worker.serving = worker.queue.popleft()
        cached = worker.cached_tokens(one.turn)
        self._hit += cached
        seconds = self._service_s(one.turn, cached)
        if self.scene.noise:
            seconds *= max(0.1, self._random.gauss(1.0, self.scene.noise))
        worker.busy_s += seconds
        worker.until = self.clock.now() + seconds
        self._at(worker.until, self._computed, worker, one, worker.generation)

    def _computed(self, worker: _Worker, one: _Arrived, generation: int) -> None:
        now = self.clock.now()
        assert one.dispatch is not None
        self._ttft.append(now - one.at)
        self._ratios.append(one.predicted_s / (now - one.placed_at))
        one.dispatch.computed()
        if generation == worker.generation:
            self._at(now + self.scene.lag_s, self._deliver, worker, worker.keep(one.turn), generation)
        worker.serving = None
        self._serve(worker)
        self._at(now + STEP_S * one.turn.output_tokens, self._ended, one)

    def _ended(self, one: _Arrived) -> None:
        assert one.dispatch is not None
        one.dispatch.close()
        self._left -= 1
        if self.trace.closed:
            context = one.turn.num_tokens + one.turn.output_tokens
            one.gateway.placer.end(MODEL, str(one.turn.session), context)
            following = self._next.get((one.turn.session, one.turn.num_tokens))
            if following is not None:
                self._at(self.clock.now() + following.at, self._arrive, following)

    def _deliver(self, worker: _Worker, batch: KvEventBatch, generation: int) -> None:
        if generation != worker.generation or not self.scene.has_events:
            return
        for gateway in self.gateways:
            applied = gateway.index.apply(gateway.members[worker.number].slot, batch)
            assert applied is Applied.DONE, applied

    def _report(self) -> None:
        for gateway, worker in itertools.product(self.gateways, self._workers):
            waiting = [one for one in (*worker.queue, worker.serving) if one is not None]
            tokens = sum(one.turn.num_tokens - worker.cached_tokens(one.turn) for one in waiting)
            load = _load(tokens if len(self.gateways) > 1 else 0, 0, self.scene.cache_blocks)
            gateway.directory.heartbeat(gateway.members[worker.number], load)
        for gateway in self.gateways:
            decay_recent(gateway.directory, self.scene.report_s)
            gateway.index.expire(self.clock.now())
        if self.on_report is not None:
            self.on_report(self)
        self._at(self.clock.now() + self.scene.report_s, self._report)

    def _restart(self, worker: _Worker) -> None:
        """Its cache is gone; what it computes or has queued it computes all the same (retries are not the subject)."""
        worker.cache.clear()
        worker.generation += 1
        worker.sequence = 0
        for gateway in self.gateways:
            gateway.join(worker, has_events=self.scene.has_events)

    # What is true

    def _service_s(self, turn: Turn, cached: int) -> float:
        new = turn.num_tokens - cached
        return BASE_S + new * TOKEN_S + SQUARE_S * new * (cached + new / 2)

    def _truly_best(self, turn: Turn) -> _Worker:
        def end(worker: _Worker) -> float:
            ahead = max(0.0, worker.until - self.clock.now()) if worker.serving is not None else 0.0
            ahead += sum(self._service_s(one.turn, worker.cached_tokens(one.turn)) for one in worker.queue)
            return ahead + self._service_s(turn, worker.cached_tokens(turn))

        return min(self._workers, key=end)

    def _worker_of(self, gateway: _Gateway, member: Member) -> _Worker:
        number = int(member.worker_id[1:])
        assert gateway.members[number] is member
        return self._workers[number]


def _registration(name: str, role: Role, pages: int, rows: int, generation: str) -> Registration:
    return Registration(
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}-{generation}"),
        role=role,
        model=MODEL,
        address=name,
        http_address=name,
        namespace=b"",
        fingerprint=FINGERPRINT,
        secret_check=b"",
        page_tokens=BLOCK_TOKENS,
        num_pages=pages,
        num_rows=rows,
        max_tokens_total=1 << 40,
        vocab_size=1,
        eos_token_ids=(),
    )


def _load(waiting_tokens: int, running: int, pages: int) -> Load:
    return Load(
        state=State.READY,
        pages_total=pages,
        pages_free=pages,
        pages_evictable=0,
        rows_total=1,
        rows_used=0,
        waiting_requests=0,
        waiting_tokens=waiting_tokens,
        running_requests=running,
        step_ms=1000 * STEP_S,
    )
