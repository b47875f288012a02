import random

import numpy as np
import pytest

from tests.fakes.engine_rig import Rig
from tests.fakes.kv_runner import reply

PROMPTS = ([1, 2, 3], [4, 5, 6, 7], [8, 9])
OUTPUTS = 12


def rig_of(num_pages, num_drafts=0, share=0.5, seed=0, **settings):
    inner = random.Random(seed)
    settings = {"page_tokens": 2, "num_rows": 3, "horizon_tokens": 0, "finish_reserve_pages": 0, **settings}
    return Rig(
        num_pages=num_pages,
        num_drafts=num_drafts,
        is_right=lambda: inner.random() < share,
        prefix_cache=False,
        **settings,
    )


def play(rig):
    seqs = {rig.submit(prompt, OUTPUTS): prompt for prompt in PROMPTS}
    rig.run()
    for seq, prompt in seqs.items():
        assert rig.sink.tokens[seq] == reply(prompt, OUTPUTS)
    return rig.engine.statistics()


EXACTLY = 1 + sum(-(-(len(prompt) + OUTPUTS - 1) // 2) for prompt in PROMPTS)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_drafts", [1, 5])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nobody_is_retracted_for_a_draft(seed, num_drafts, share):
    assert play(rig_of(EXACTLY))["retractions"] == 0
    assert play(rig_of(EXACTLY, num_drafts, share, seed))["retractions"] == 0


def uneven(num_pages, **drafts):
    """One row ends early and leaves its pages to the other: no page is spare in between."""
    rig = rig_of(num_pages, num_rows=2, **drafts)
    short, long = rig.submit([1, 2, 3], 6), rig.submit([4, 5], 24)
    rig.run()
    assert rig.sink.tokens[short] == reply([1, 2, 3], 6)
    assert rig.sink.tokens[long] == reply([4, 5], 24)
    return rig.engine.statistics()


def test_rows_verify_fewer_drafts_where_pages_are_short():
    fits = next(pages for pages in range(14, 30) if not uneven(pages)["retractions"])
    tight, roomy = uneven(fits, num_drafts=5, share=0.0), uneven(fits + 20, num_drafts=5, share=0.0)
    assert tight["retractions"] == 0
    assert tight["drafts_verified"] < roomy["drafts_verified"]


def test_short_of_pages_a_draft_gives_way_and_the_row_goes_on():
    rig = rig_of(40, 5, 0.0, num_rows=2)
    seq = rig.submit([1, 2, 3], 20)
    for _ in range(3):
        rig.turn()
    # Somebody else holds every free page for a while.
    pool = rig.holdings.pool
    taken = pool.allocate(pool.num_free, 99)
    rig.engine.audit = list
    narrow = []
    for _ in range(10):
        before = len(rig.runner.computed)
        rig.turn()
        narrow += [end - start for _, start, end in rig.runner.computed[before:]]
    assert sorted(set(narrow)) == [2, 3, 4, 5, 6]
    assert rig.engine.statistics()["retractions"] == 0
    pool.free(taken, 0, owner=99)
    del rig.engine.audit
    rig.run()
    assert rig.sink.tokens[seq] == reply([1, 2, 3], 20)


def test_pages_are_made_for_the_upper_bound_of_every_step_in_flight():
    rig = rig_of(60, 5, 1.0, num_rows=1)
    rig.submit([1, 2, 3], 30)
    spare = []
    real = rig.loop.runner.launch

    def launch(plan):
        rows = rig.holdings.rows
        spare.append(int(rows.num_pages[0]) * 2 - min(int(rows.scheduled[0]), int(rows.kv_limit[0])))
        return real(plan)

    rig.loop.runner.launch = launch
    rig.run()
    assert len(spare) > 5
    assert min(spare) >= 0


@pytest.mark.parametrize(("outputs", "steps"), [(1, 1), (2, 2), (7, 2), (8, 3), (13, 3), (14, 4)])
def test_right_drafts_save_steps_and_none_is_planned_behind_the_end(outputs, steps):
    rig = rig_of(60, 5, 1.0)
    seq = rig.submit([1, 2, 3], outputs)
    rig.run()
    assert rig.sink.tokens[seq] == reply([1, 2, 3], outputs)
    ends = [end for _, _, end in rig.runner.computed]
    assert max(ends) <= 3 + outputs - 1
    useful = [piece for piece in rig.runner.computed if piece[2] > piece[1]]
    assert len(useful) == steps


def test_a_step_s_plan_bounds_what_a_row_can_write():
    rig = rig_of(60, 3, 0.5, num_rows=2)
    rig.submit([1, 2, 3], 20)
    rig.submit([4, 5], 20)
    for _ in range(12):
        rig.turn()
        rows = rig.holdings.rows
        assert (rows.committed <= rows.scheduled - rows.slack).all()
        assert (rows.slack >= 0).all()
        assert (rows.scheduled - rows.slack - rows.committed <= np.where(rows.slack > 0, 1, rows.goal)).all()
