"""Planted faults of the scheduler: each is a function that patches one class; random traffic must notice every one."""

import numpy as np

from engine.cache.page_pool import PagePool
from engine.scheduler import decode
from engine.scheduler.admission import Admission
from engine.scheduler.chains import Chains
from engine.scheduler.departures import Departures
from engine.scheduler.holdings import Holdings
from engine.scheduler.landing import Landing
from engine.scheduler.outbox import Outbox
from engine.scheduler.planner import Planner
from engine.scheduler.results import Results
from engine.scheduler.row_table import RowTable


def pages_are_freed_without_a_fence(patch):
    real = PagePool.free
    patch.setattr(PagePool, "free", lambda self, pages, fence, owner=None: real(self, pages, 0, owner=owner))


def row_generations_stand_still(patch):
    real = RowTable.release

    def release(self, row, fence):
        real(self, row, fence)
        self.generation[row] -= np.uint32(1)

    patch.setattr(RowTable, "release", release)


def open_pages_are_forgotten_at_drop(patch):
    real = Landing.drop
    patch.setattr(Landing, "drop", lambda self, seq, open_pages: real(self, seq, ()))


def duplicates_stay_in_the_mirror(patch):
    real = Holdings.publish

    def publish(self, seq, num_tokens):
        sent = int(self.rows.sent_pages[seq.row])
        real(self, seq, num_tokens)
        self.rows.sent_pages[seq.row] = sent

    patch.setattr(Holdings, "publish", publish)


def retraction_forgets_outputs(patch):
    real = Holdings.close_row

    def close_row(self, seq, *, keep_tokens=False):
        real(self, seq)

    patch.setattr(Holdings, "close_row", close_row)


def growth_comes_a_token_late(patch):
    patch.setattr(decode, "needs_page", lambda scheduled, pages, size: scheduled > pages * size)


def the_last_token_counts_as_cached(patch):
    patch.setattr(Chains, "_limit", lambda self, seq: len(seq.tokens) // self._size)


def a_landed_row_is_not_set_up(patch):
    real = Holdings.activate
    patch.setattr(Holdings, "activate", lambda self, seq, next_token=-1: real(self, seq))


def announcements_come_before_the_step(patch):
    real = Planner._build

    def build(self, decode_rows, chunk_rows, lengths):
        plan = real(self, decode_rows, chunk_rows, lengths)
        for row in chunk_rows:
            seq = self._sequence(row)
            if seq.is_source:
                self._admission._sources.announce(seq, int(self._holdings.rows.scheduled[row]))
        return plan

    patch.setattr(Planner, "_build", build)


def promises_are_not_counted(patch):
    real = Admission._book

    def book(self, gate, now):
        before = self._holdings.promised_pages
        real(self, gate, now)
        self._holdings.promised_pages = before

    patch.setattr(Admission, "_book", book)


def aborted_pages_leak(patch):
    real = Departures.end

    def end(self, seq):
        if seq.row >= 0:
            self._holdings.rows.num_pages[seq.row] = self._holdings.rows.tree_pages[seq.row]
        real(self, seq)

    patch.setattr(Departures, "end", end)


def tokens_are_told_twice(patch):
    real = Outbox.tokens

    def tokens(self, seqs, positions, tokens):
        real(self, seqs, positions, tokens)
        if len(seqs) > 2:
            real(self, seqs[:1], positions[:1], tokens[:1])

    patch.setattr(Outbox, "tokens", tokens)


def stops_are_ignored(patch):
    patch.setattr(RowTable, "is_stop", lambda self, rows, tokens, positions: np.zeros(len(rows), np.bool_))


def a_foreign_prefix_is_reused(patch):
    patch.setattr(Chains, "_grow", _constant_hashes)


def _constant_hashes(self, seq, hits, chain, tokens, num_pages):
    while len(chain) < num_pages:
        chain.append(bytes([len(chain) % 256]) * 32)


def unprocessed_tokens_are_published(patch):
    real = Results._chunk_done

    def chunk_done(self, plan, result, i, end):
        row = int(plan.rows[i])
        real(self, plan, result, i, min(int(self._holdings.rows.scheduled[row]), int(self._holdings.rows.goal[row])))

    patch.setattr(Results, "_chunk_done", chunk_done)


MUTANTS = (
    pages_are_freed_without_a_fence,
    row_generations_stand_still,
    open_pages_are_forgotten_at_drop,
    duplicates_stay_in_the_mirror,
    retraction_forgets_outputs,
    growth_comes_a_token_late,
    the_last_token_counts_as_cached,
    a_landed_row_is_not_set_up,
    announcements_come_before_the_step,
    promises_are_not_counted,
    aborted_pages_leak,
    tokens_are_told_twice,
    stops_are_ignored,
    a_foreign_prefix_is_reused,
    unprocessed_tokens_are_published,
)
