"""Every short interleaving of what can befall two sequences with a step in flight, in a pool with hardly a spare page.

The runner touches memory as late as it can, a remote writer as early as it can; `hot` pages therefore change hands
while steps that used them may still run. All texts must be right and all pages come back (T-FENCE, small cases).
"""

import itertools

import pytest

from core.errors import TandemError
from core.request import FinishReason
from tests.fakes.engine_rig import Rig, request_of
from tests.fakes.kv_runner import reply
from tests.property.mutants_engine import pages_are_freed_without_a_fence, row_generations_stand_still

X, Y, Z = [1, 2, 3, 4, 5], [1, 2, 9, 9], [7, 7, 7, 8, 8, 8]
DEPTH = 3


class Case:
    """Two running sequences, and the moves that a test strings together."""

    def __init__(self):
        self.rig = Rig(
            page_tokens=1, num_pages=26, num_rows=4, chunk_tokens=8, horizon_tokens=0, finish_reserve_pages=0
        )
        self.wanted = {}
        self.dead = set()
        self.remote = []
        self.submit(X, 9)
        self.submit(Y, 9)
        for _ in range(3):
            self.rig.turn()

    def submit(self, prompt, outputs):
        self.wanted[self.rig.submit(prompt, outputs)] = reply(prompt, outputs)

    def alive(self):
        sink = self.rig.sink
        return [seq for seq in self.wanted if seq not in sink.finished and seq not in self.dead]

    def abort(self):
        if alive := self.alive():
            self.dead.add(alive[0])
            self.rig.engine.abort(alive[0])

    def retract(self):
        self.rig.engine._planner._retract_one(0.0, keep=0)

    def twin(self):
        self.submit(X, 4)

    def flush(self):
        self.rig.engine.flush_cache()

    def turn(self):
        self.rig.turn()

    def hand_over(self):
        request = request_of(Z, 6)

        def on_booked(booking):
            assert not isinstance(booking, TandemError)
            self.rig.engine.land(booking.seq, booking.prefix_tokens, len(Z), on_pages)

        def on_pages(landing):
            for position, page in zip(range(landing.start, landing.end), landing.pages, strict=True):
                self.rig.runner.pages[page, 0] = (Z[position], position)
            self.remote.append(landing.seq)

        self.rig.engine.book(request, 1e9, on_booked)

    def commit_landed(self):
        wanted = reply(Z, 6)
        for seq in self.remote:
            self.rig.engine.commit(seq, wanted[:1], (), None, 0)
            self.rig.sink.tokens[seq] = wanted[:1]
            self.rig.sink.first_position[seq] = 0
            self.wanted[seq] = wanted
        self.remote.clear()

    def play(self, moves):
        for move in moves:
            getattr(self, move)()
            self.rig.check()
        for _ in range(300):
            worked = self.rig.turn()
            self.commit_landed()
            if not worked and not self.rig.engine.statistics()["sequences"]:
                break
        for seq, wanted in self.wanted.items():
            got = self.rig.sink.tokens[seq]
            assert got == (wanted[: len(got)] if seq in self.dead else wanted), moves
            assert seq in self.dead or self.rig.sink.finished[seq].reason is FinishReason.LENGTH
        self.rig.assert_nothing_held()


MOVES = ("abort", "retract", "hand_over", "twin", "flush", "turn")


@pytest.mark.parametrize("first", MOVES)
def test_every_interleaving_keeps_all_texts_right(first):
    for rest in itertools.product(MOVES, repeat=DEPTH - 1):
        Case().play((first, *rest))


@pytest.mark.parametrize("mutant", [pages_are_freed_without_a_fence, row_generations_stand_still])
def test_a_planted_fault_is_noticed_by_some_interleaving(mutant, monkeypatch):
    mutant(monkeypatch)
    for moves in itertools.product(MOVES, repeat=DEPTH):
        try:
            Case().play(moves)
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} went unnoticed")
