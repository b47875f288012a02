"""An engine on a fake runner, driven pass by pass by a test; collects every event and checks what must always hold."""

from collections import defaultdict

import numpy as np

from core.clock import ManualClock
from core.hashing import Namespace, PageHasher
from core.ids import RequestId
from core.kv import Component, ComponentKind, KVLayout
from core.request import GenerateRequest, SamplingParams, StopRules
from engine.barrier import SoloBarrier
from engine.cache.hit import PAGES
from engine.cache.page_state import PageState
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import StepLoop
from tests.fakes.kv_runner import KvRunner

EOS = 96


class Facts:
    vocab_size = 97
    eos_token_ids = (EOS,)
    reuse = PAGES
    images = None

    def __init__(self, max_positions=4096):
        self.max_positions = max_positions


def layout_of(config, ring_tokens=0):
    """One paged component, and one ring per row if asked for."""
    size = config.page_tokens
    parts = [
        Component(
            name="full", kind=ComponentKind.PAGED, record_bytes=64, num_records=config.num_pages, stride_bytes=64,
            capacity_tokens=size,
        )
    ]  # fmt: skip
    if ring_tokens:
        parts.append(
            Component(
                name="window", kind=ComponentKind.RING, record_bytes=64, num_records=config.num_rows, stride_bytes=64,
                region=1, capacity_tokens=ring_tokens,
            )
        )  # fmt: skip
    return KVLayout(page_tokens=size, components=tuple(parts))


def hasher_of(config):
    namespace = Namespace(model="m", revision="r", tokenizer="t", kv_dtype="f32", page_tokens=config.page_tokens)
    return PageHasher(b"secret", namespace.encode(), config.page_tokens)


def request_of(prompt, max_tokens, *, outputs=(), name="r", seed=0, **fields):
    """A request; `outputs` are tokens of an earlier attempt."""
    stop = {key: fields.pop(key) for key in ("min_tokens", "stop_token_ids", "ignore_eos") if key in fields}
    sampling = {key: fields.pop(key) for key in ("num_logprobs", "temperature", "prompt_logprobs") if key in fields}
    return GenerateRequest(
        request_id=RequestId(name),
        model="m",
        token_ids=(*prompt, *outputs),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=seed, **sampling),
        stop=StopRules(max_tokens=max_tokens, **{"ignore_eos": True, **stop}),
        **fields,
    )


def announced_from(request, prefix_tokens, hits):
    """Where the source begins to announce, as `kv_transfer.source_transfer` does."""
    return min(prefix_tokens, hits[0]) if hits and request.floors is None else prefix_tokens


class ListInbox:
    """Calls that a test queues for the next pass."""

    def __init__(self):
        self.calls = []
        self.is_closed = False

    def run_some(self, engine, limit):
        calls, self.calls = self.calls[:limit], self.calls[limit:]
        for call in calls:
            call(engine)
        return len(calls)

    def wait(self, timeout_s):
        raise AssertionError("a test drives the loop by turns")


class Collector:
    """Everything emitted, by sequence; fails on a repeated or skipped output position."""

    def __init__(self):
        self.tokens = defaultdict(list)
        self.first_position = {}
        self.logprobs = defaultdict(list)
        self.chunks = defaultdict(list)
        self.prefilled, self.started, self.finished, self.failed = {}, {}, {}, {}
        self.kv_events = []
        self.batches = 0

    def emit(self, events):
        assert not events.is_empty
        self.batches += 1
        for seq, position, token in zip(
            events.seqs.tolist(), events.positions.tolist(), events.tokens.tolist(), strict=True
        ):
            assert seq not in self.finished, "a token after the end"
            assert seq not in self.failed, "a token after the end"
            first = self.first_position.setdefault(seq, position)
            assert position == first + len(self.tokens[seq]), "each output position once, in order"
            self.tokens[seq].append(token)
        for seq, items in events.logprobs.items():
            self.logprobs[seq].extend(items)
        for chunk in events.chunks:
            self.chunks[chunk.seq].append(chunk)
        for kind, seen in (
            (events.prefilled, self.prefilled),
            (events.started, self.started),
            (events.finished, self.finished),
            (events.failed, self.failed),
        ):
            for event in kind:
                assert event.seq not in seen, "told twice"
                seen[event.seq] = event
        self.kv_events.extend(events.kv_events)


class Rig:
    """Engine, runner and loop in one thread."""

    overdraw = 0
    """Tokens by which a step may exceed its budget: one image, for prompts that have any."""

    def __init__(
        self,
        *,
        ring_tokens=0,
        max_positions=4096,
        when=lambda step: "collect",
        runner=None,
        num_drafts=0,
        is_right=lambda: True,
        **settings,
    ):
        settings = {"page_tokens": 4, "num_pages": 64, "num_rows": 8, "chunk_tokens": 16, **settings}
        self.config = EngineConfig(**settings)
        self.clock = ManualClock(100.0)
        self.ring_tokens = ring_tokens
        self.engine = Engine(
            config=self.config,
            facts=Facts(max_positions),
            layout=layout_of(self.config, ring_tokens),
            hasher=hasher_of(self.config),
            clock=self.clock,
            num_drafts=num_drafts,
        )
        self.holdings = self.engine._holdings
        self.runner = runner or KvRunner(
            self.config.num_pages,
            self.config.num_rows,
            self.config.page_tokens,
            ring_tokens=ring_tokens,
            when=when,
            on_launch=self._check_plan,
            num_drafts=num_drafts,
            is_right=is_right,
        )
        self.inbox = ListInbox()
        self.sink = Collector()
        self.loop = StepLoop(
            engine=self.engine,
            runner=self.runner,
            inbox=self.inbox,
            sink=self.sink,
            clock=self.clock,
            barrier=SoloBarrier(),
        )
        self.plans = 0

    def _check_plan(self, plan):
        """No step may write a page that is not its row's own (I10)."""
        self.plans += 1
        rows, size = self.holdings.rows, self.config.page_tokens
        decoding = int(np.diff(plan.q_start)[plan.use_next == 1].sum())
        budget = max(self.config.chunk_tokens, decoding + size)
        assert len(plan.tokens) <= budget + self.overdraw, "the token budget is exceeded"
        for row, start, length in zip(plan.rows, plan.seq_start, np.diff(plan.q_start), strict=True):
            columns = np.arange(start // size, -(-(start + length) // size))
            pages = rows.page_table[row, columns]
            assert (columns < rows.num_pages[row]).all()
            assert (self.holdings.pool.states(pages) == PageState.PRIVATE).all(), "a step writes a page it may not"
            assert (self.holdings.pool.owners(pages) == rows.seq[row]).all(), "a step writes another's page"

    def submit(self, prompt, max_tokens, deadline=1e9, **fields):
        return self.engine.submit(request_of(prompt, max_tokens, **fields), deadline)

    def turn(self):
        worked = self.loop.turn()
        self.check()
        return worked

    def check(self):
        found = self.engine.audit()
        assert found == [], found

    def run(self, limit=10_000):
        """Turn until nothing happens; returns the number of passes."""
        for passes in range(limit):
            if not self.turn():
                return passes
        raise AssertionError(f"still working after {limit} passes")

    def run_while(self, condition, limit=10_000):
        for _ in range(limit):
            if not condition():
                return
            self.turn()
        raise AssertionError("the condition did not change")

    @property
    def idle_pages(self):
        """Pages that are free or cached."""
        return self.holdings.pool.num_free + self.holdings.tree.num_evictable

    def assert_nothing_held(self):
        self.run()
        assert self.idle_pages == self.config.num_pages - 1, self.engine.statistics()
        assert self.holdings.rows.num_used == 0
        assert self.engine.statistics()["sequences"] == 0
        assert self.holdings.promised_pages == 0
