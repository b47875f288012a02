import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.models.deepseek_v41.ngrams import batch_ngrams
from engine.models.deepseek_v41.step_rows import StepRows

I32 = np.int32
WINDOW, CAPACITY, PAGE = 4, 6, 8


def batch_of(starts, lengths, history=3, ids=None):
    """Sequence i owns pages 10 i + 1, 10 i + 2, ... and engine row 5 + i."""
    q_start = np.concatenate(([0], np.cumsum(lengths))).astype(I32)
    owner = np.repeat(np.arange(len(starts)), lengths)
    positions = np.arange(len(owner)) - q_start[owner] + np.array(starts)[owner]
    table = np.arange(1, 5) + 10 * np.arange(len(starts))[:, None]
    return ForwardBatch(
        token_ids=torch.arange(100, 100 + len(owner)) if ids is None else torch.tensor(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(table[owner, positions // PAGE] * PAGE + positions % PAGE),
        page_table=torch.from_numpy(table),
        rows=np.arange(5, 5 + len(starts), dtype=I32),
        q_start=q_start,
        seq_start=np.array(starts, I32),
        sample_at=torch.zeros(0, dtype=torch.int64),
        page_tokens=PAGE,
        deterministic=False,
        history=torch.tensor(
            [[([-1] * history + list(range(s)))[-history:][i] for i in range(history)] for s in starts]
        ),
    )


def rows_of(starts, lengths, kept=None, tile=1):
    return StepRows(batch_of(starts, lengths), np.array(lengths if kept is None else kept), tile)


def named(rows, plan):
    """What every entry of a plan's index stands for: (sequence, position), old ones read from rings."""
    old = list(zip((plan.old.record - 5).tolist(), plan.old.positions.tolist(), strict=True))
    own = list(zip(rows.owner.tolist(), rows.positions[: rows.num].tolist(), strict=True))
    return [[(old + own)[i] for i in line] for line in plan.index.tolist()]


def test_kept_rows_are_the_last_of_each_sequence():
    rows = rows_of([3, 0, 7], [5, 2, 1], kept=[2, 0, 1], tile=4)
    assert (rows.num, rows.size) == (3, 4)
    assert rows.at.tolist() == [3, 4, 7, 0]
    assert rows.positions.tolist() == [6, 7, 7, 0]
    assert rows.owner.tolist() == [0, 0, 2]
    assert rows.visible(2).tolist() == [3, 4, 4]
    assert rows.table()[:3, 0].tolist() == [1, 1, 21]


def test_windows_reach_into_the_ring_and_end_at_the_floor():
    rows = rows_of([6, 0, 2], [3, 2, 1], tile=4)
    plan = rows.window(np.array([5, 0, 0]), WINDOW, CAPACITY)
    assert plan.old.positions.tolist() == [5, 0, 1]
    assert plan.old.record.tolist() == [5, 7, 7]
    seen = [
        [place for place, valid in zip(line, mask, strict=True) if valid]
        for line, mask in zip(named(rows, plan), plan.valid.tolist(), strict=True)
    ]
    assert seen[:3] == [[(0, 5), (0, 6)], [(0, 5), (0, 6), (0, 7)], [(0, 5), (0, 6), (0, 7), (0, 8)]]
    assert seen[3:5] == [[(1, 0)], [(1, 0), (1, 1)]]
    assert seen[5] == [(2, 0), (2, 1), (2, 2)]
    assert seen[6:] == [[], []], "padding sees nothing"


def test_tokens_below_the_floor_see_nothing_and_are_not_kept():
    rows = rows_of([4], [6])
    plan = rows.window(np.array([8]), WINDOW, CAPACITY)
    assert plan.valid.sum(1).tolist() == [0, 0, 0, 0, 1, 2]
    assert plan.kept.positions.tolist() == [8, 9]
    assert len(plan.old.positions) == 0


def test_of_a_long_chunk_only_what_fits_into_the_ring_is_kept():
    rows = rows_of([10, 0], [9, 2])
    kept = rows.window(np.array([0, 0]), WINDOW, CAPACITY).kept
    assert kept.positions.tolist() == [13, 14, 15, 16, 17, 18, 0, 1]
    assert kept.record.tolist() == [5] * 6 + [6] * 2
    assert len({(r, p % CAPACITY) for r, p in zip(kept.record.tolist(), kept.positions.tolist(), strict=True)}) == 8


def test_entries_are_pooled_from_old_and_new_tokens():
    rows = rows_of([5, 0], [4, 3], tile=2)
    plan = rows.entries(2, 4, CAPACITY, np.zeros(2, np.int64))
    # Tokens 5 and 7 of the first sequence and 1 of the second complete entries; overlap reads the group before.
    assert named(rows, plan)[:3] == [
        [(0, 2), (0, 3), (0, 4), (0, 5)],
        [(0, 4), (0, 5), (0, 6), (0, 7)],
        [named(rows, plan)[2][0], named(rows, plan)[2][1], (1, 0), (1, 1)],
    ]
    assert plan.exists.tolist()[2] == [False, False, True, True]
    assert plan.first.tolist()[:3] == [4, 6, 0]
    assert (plan.page.tolist(), plan.at.tolist()) == ([1, 1, 11], [2, 3, 0])
    assert len(plan.index) == 4, "padded to whole tiles"


def test_tokens_below_the_first_written_one_complete_nothing():
    plan = rows_of([4, 0], [8, 4]).entries(2, 2, CAPACITY, np.array([8, 0]))
    assert plan.first.tolist() == [8, 10, 0, 2]
    assert plan.page.tolist() == [2, 2, 11, 11]


def test_ngrams_cross_borders_of_chunks_but_not_of_sequences_or_images():
    batch = batch_of([5, 0], [2, 3], ids=[50, 51, 60, 9, 61])
    assert batch_ngrams(batch, 4, image_token=9).tolist() == [
        [50, 4, 3, 2],
        [51, 50, 4, 3],
        [60, -1, -1, -1],
        [-1, 60, -1, -1],
        [61, -1, 60, -1],
    ]
