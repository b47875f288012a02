"""Batches on a device follow from plans as those on host memory do, padding and histories included."""

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig, GraphsConfig
from engine.runner.decode_graphs import tiers_of
from engine.runner.device_mirror import DeviceMirror, StepShape
from engine.runner.device_stream import ImmediateStream
from engine.runner.row_mirror import RowMirror
from tests.unit.engine.runner.test_model_runner import config_of, init_of, plan_of

PAGES, HISTORY = 6, 3


def staged(mirror, plan, shape=None):
    chosen = np.flatnonzero(plan.sample)
    shape = shape or StepShape(len(plan.rows), len(plan.tokens), len(chosen))
    mirror.stage(plan, shape, chosen)
    return shape, mirror.batch(shape, plan if shape.rows == len(plan.rows) else None)


def on_host(mirror, plan):
    mirror.set_up(plan)
    ids = plan.tokens.astype(np.int64)
    decoding = np.flatnonzero(plan.use_next)
    ids[plan.q_start[decoding]] = mirror.next_token[plan.rows[decoding]]
    last = plan.q_start[np.flatnonzero(plan.sample) + 1].astype(np.int64) - 1
    return mirror.batch(plan.rows, plan.q_start, plan.seq_start, ids, last)


def test_steps_give_the_batches_that_the_host_makes():
    device, host = DeviceMirror(config_of(), PAGES, ImmediateStream(), HISTORY), RowMirror(config_of(), PAGES, HISTORY)
    plans = [
        plan_of(1, [(2, [5, 6, 7, 8, 9], 0, 1), (0, [1, 2], 0, 0)], deltas=[(2, 0, 9), (2, 1, 4), (2, 1, 5), (0, 0, 3)],
                inits=[init_of(0), init_of(2)]),
        plan_of(2, [(0, [3, 4, 5], 2, 1), (2, None, 5, 1)], deltas=[(0, 1, 7)]),
        plan_of(3, [(2, None, 6, 1), (0, None, 5, 1), (3, None, 1, 1)], deltas=[(3, 0, 8)], inits=[init_of(3, 6)]),
    ]  # fmt: skip
    for step, plan in enumerate(plans):
        want = on_host(host, plan)
        shape, got = staged(device, plan)
        for field in ("token_ids", "positions", "slots", "sample_at", "history"):
            assert getattr(got, field).tolist() == getattr(want, field).tolist(), field
        used = want.page_table.shape[1]
        for mine, theirs in zip(got.page_table[:, :used].tolist(), want.page_table.tolist(), strict=True):
            assert all(a == b for a, b in zip(mine, theirs, strict=True) if b)
        rows = got.device_rows
        assert (rows.rows.tolist(), rows.q_start.tolist(), rows.seq_start.tolist()) == (
            plan.rows.tolist(), plan.q_start.tolist(), plan.seq_start.tolist(),
        )  # fmt: skip
        assert rows.max_q == int(np.diff(plan.q_start).max())
        chosen = plan.rows[np.flatnonzero(plan.sample)]
        device.keep(shape, torch.arange(len(chosen)) + 10 * step)
        host.next_token[chosen] = np.arange(len(chosen)) + 10 * step


def test_a_row_with_floors_is_plain_once_it_is_behind_what_was_known():
    mirror = DeviceMirror(config_of(), PAGES, ImmediateStream())
    floored = msgspec.structs.replace(init_of(1, 7), encoder_floor=1, known_tokens=5, write_from=3)
    for step, (length, plain) in enumerate([(4, False), (5, True), (9, True)], start=1):
        plan = plan_of(step, [(1, None, length, 1)], inits=[floored] if step == 1 else [])
        mirror.take_floors(plan)
        assert mirror.is_plain(plan) is plain, length
    # What runs whole has floors at every length; the next owner of a row has its own.
    whole = plan_of(4, [(1, None, 9, 1)], inits=[msgspec.structs.replace(floored, known_tokens=0)])
    mirror.take_floors(whole)
    assert not mirror.is_plain(whole)
    free = plan_of(5, [(1, None, 2, 1)], inits=[init_of(1, 7)])
    mirror.take_floors(free)
    assert mirror.is_plain(free)


def test_padding_stores_nothing_and_has_no_query_tokens():
    mirror = DeviceMirror(config_of(), PAGES, ImmediateStream(), HISTORY)
    staged(mirror, plan_of(1, [(1, [5, 6], 0, 1)], deltas=[(1, 0, 4)], inits=[init_of(1)]))
    before = mirror._recent.clone()
    shape = StepShape(4, 4, 4)
    _, batch = staged(mirror, plan_of(2, [(1, None, 2, 1)]), shape)
    assert batch.slots.tolist() == [4 * 4 + 2, -1, -1, -1]
    assert batch.token_ids.tolist()[1:] == [0, 0, 0]
    assert batch.positions.tolist() == [2, 0, 0, 0]
    assert batch.device_rows.q_start.tolist() == [0, 1, 1, 1, 1]
    assert batch.history[1:].eq(-1).all()
    changed = (mirror._recent != before).nonzero().flatten().tolist()
    assert all(4 <= at < 8 or at >= 16 for at in changed), "only row 1 and the record of nowhere"


def test_more_changes_than_an_upload_has_room_for_still_arrive():
    config = EngineConfig(page_tokens=1, num_pages=30_000, num_rows=2, chunk_tokens=4)
    mirror = DeviceMirror(config, 20_000, ImmediateStream())
    deltas = [(1, column, column + 1) for column in range(20_000)]
    _, batch = staged(mirror, plan_of(1, [(1, [5], 19_999, 1)], deltas=deltas, inits=[init_of(1)]))
    assert batch.slots.tolist() == [20_000]
    assert batch.page_table[0].tolist() == list(range(1, 20_001))


@pytest.mark.parametrize(
    ("rows", "tiers", "want"), [(1, (), (1,)), (12, (), (1, 2, 4, 8, 12)), (8, (3, 20, 8), (3, 8)), (4, (1,), (1, 4))]
)
def test_tiers_reach_from_one_row_to_all(rows, tiers, want):
    assert tiers_of(config_of(num_rows=rows, graphs=GraphsConfig(tiers=tiers))) == want
