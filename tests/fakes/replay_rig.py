"""An engine on a `ReplayRunner`, driven pass by pass; every text is compared with what its floors demand."""

import numpy as np

from core.clock import ManualClock
from engine.barrier import SoloBarrier
from engine.cache.page_state import PageState
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import StepLoop
from tests.fakes.engine_rig import Collector, Facts, ListInbox, announced_from, hasher_of, layout_of, request_of
from tests.fakes.replay_runner import RULE, WINDOW, ReplayRunner, replay_text

FAR = 1e9


class ReplayRig:
    """Engine, runner and loop in one thread."""

    def __init__(self, *, rule=RULE, max_positions=4096, num_drafts=0, is_right=lambda: True, **settings):
        settings = {"page_tokens": 4, "num_pages": 96, "num_rows": 6, "chunk_tokens": 16, **settings}
        self.config = EngineConfig(**settings)
        self.rule = rule
        facts = Facts(max_positions)
        facts.reuse = rule
        self.clock = ManualClock(100.0)
        self.engine = Engine(
            config=self.config,
            facts=facts,
            layout=layout_of(self.config, WINDOW + 2),
            hasher=hasher_of(self.config),
            clock=self.clock,
            num_drafts=num_drafts,
        )
        self.holdings = self.engine._holdings
        self.runner = ReplayRunner(
            self.config.num_pages,
            self.config.num_rows,
            self.config.page_tokens,
            rule=rule,
            on_launch=self._check_plan,
            num_drafts=num_drafts,
            is_right=is_right,
        )
        self.sink = Collector()
        self.loop = StepLoop(
            engine=self.engine, runner=self.runner, inbox=ListInbox(), sink=self.sink, clock=self.clock,
            barrier=SoloBarrier(),
        )  # fmt: skip

    def _check_plan(self, plan):
        """A step writes only pages of its own rows; the rows it replays write none."""
        rows, size = self.holdings.rows, self.config.page_tokens
        decoding = int(np.diff(plan.q_start)[plan.use_next == 1].sum())
        assert len(plan.tokens) <= max(self.config.chunk_tokens, decoding + size), "the budget is exceeded"
        for row, start, length in zip(plan.rows, plan.seq_start, np.diff(plan.q_start), strict=True):
            seq = self.holdings.sequences[int(rows.seq[row])]
            columns = np.arange(max(start, seq.stage.write_from) // size, -(-(start + length) // size))
            pages = rows.page_table[row, columns]
            assert (columns < rows.num_pages[row]).all()
            assert (self.holdings.pool.states(pages) == PageState.PRIVATE).all(), "a step writes a page it may not"
            assert (self.holdings.pool.owners(pages) == rows.seq[row]).all(), "a step writes another's page"

    def turn(self):
        worked = self.loop.turn()
        found = self.engine.audit()
        assert found == [], found
        return worked

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError("still working")

    def submit(self, prompt, max_tokens, **fields):
        return self.engine.submit(request_of(prompt, max_tokens, **fields), FAR)

    def ask(self, prompt, max_tokens, **fields):
        """Run one request alone (with whatever is cached); returns its tokens and its floors."""
        seq = self.submit(prompt, max_tokens, **fields)
        self.run()
        assert seq in self.sink.finished, self.sink.failed
        return self.sink.tokens[seq], self.sink.started[seq].floors

    def truth(self, prompt, max_tokens, floors, seed=0):
        return replay_text(prompt, max_tokens, seed, floors, self.rule)

    def assert_nothing_held(self):
        self.run()
        idle = self.holdings.pool.num_free + self.holdings.tree.num_evictable
        assert idle == self.config.num_pages - 1, self.engine.statistics()
        assert self.holdings.rows.num_used == 0
        assert self.engine.statistics()["sequences"] == 0
        assert self.holdings.promised_pages == 0


def hand_over(source, target, request, *, spoil=None):
    """Prefill on one engine, copy pages and rings, commit on the other; returns (sequence there, bytes' pages, Prefilled)."""
    answers = []
    seq = target.engine.book(request, FAR, answers.append)
    target.turn()
    booking = answers[0]
    there = source.engine.submit_source(request, FAR)
    source.run()
    done = source.sink.prefilled[there]
    chunks = source.sink.chunks[there]
    size, moved = target.config.page_tokens, 0
    due = announced_from(request, booking.prefix_tokens, chunks[0].hits)
    for chunk in chunks:
        start = max(chunk.start, due)
        if start >= chunk.end:
            continue
        landed = []
        target.engine.land(seq, start, chunk.end, landed.append)
        target.turn()
        theirs = [ref.page for ref in chunk.pages][(start - chunk.start) // size :]
        assert len(landed[0].pages) == len(theirs)
        target.runner.pages[list(landed[0].pages)] = source.runner.pages[theirs]
        moved += len(theirs)
    for kind, rings in target.runner.rings.items():
        rings[booking.row] = source.runner.rings[kind][done.row]
    assert source.engine.epochs_unchanged(there)
    source.engine.release(there)
    source.run()
    floors = spoil(done.floors) if spoil else done.floors
    target.engine.commit(seq, done.first_tokens, (), done.finish, done.num_cached_tokens, floors=floors)
    target.sink.tokens[seq] = list(done.first_tokens)
    target.sink.first_position[seq] = request.num_output_tokens
    return seq, moved, done
