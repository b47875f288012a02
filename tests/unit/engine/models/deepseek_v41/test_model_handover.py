import numpy as np
import pytest
import torch

from core.kv import ComponentKind
from tests.fakes.deepseek_driver import PAGE, Driver, Truth, reference, text, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def record(driver, component, index):
    buffer = np.frombuffer(driver.buffers[component.region], np.uint8)
    begin = component.offset + index * component.stride_bytes
    return buffer[begin : begin + component.record_bytes]


def move(source, target, row_from, row_to, length, held=0):
    """Copy what a hand-over moves: pages from `held` on, and the row's records."""
    assert source.layout.digest() == target.layout.digest()
    for theirs, ours in zip(source.layout.components, target.layout.components, strict=True):
        if ours.kind is ComponentKind.PAGED:
            for column in range(held // PAGE, -(-length // PAGE)):
                mine, other = target.tables[row_to, column], source.tables[row_from, column]
                record(target, ours, mine)[:] = record(source, theirs, other)
        else:
            record(target, ours, row_to)[:] = record(source, theirs, row_from)
    target.restart(row_to, source.rows[row_from].ids[:length], length)


@pytest.mark.parametrize(("length", "held"), [(1, 0), (2, 0), (7, 0), (21, 0), (21, 16), (40, 16), (41, 40)])
def test_decoding_after_a_hand_over_is_equal_to_the_bit_to_staying(model, length, held):
    ids = text(1, 60)
    source, target = Driver(model, deterministic=True), Driver(model, deterministic=True, seed=9)
    source.step({1: ids[:length]})
    if held:
        # The destination computed the prefix for somebody else and shares those pages.
        target.step({0: ids[:held]})
        target.tables[3, : held // PAGE] = target.tables[0, : held // PAGE]
    move(source, target, 1, 3, length, held)
    for token in ids[length : length + 3]:
        stayed, moved = source.step({1: [token]})[1], target.step({3: [token], 2: [4]})[3]
        assert torch.equal(stayed, moved)
    verify = ids[length + 3 : length + 9]
    assert torch.equal(source.step({1: verify})[1], target.step({3: verify})[3])


def test_a_hand_over_without_pending_rows_would_be_seen(model):
    # The negative control: an odd length leaves half a pair behind.
    ids = text(1, 60)
    whole = Truth(reference()).run(ids[:22])
    source, target = Driver(model), Driver(model)
    source.step({1: ids[:21]})
    move(source, target, 1, 3, 21)
    pending = next(c for c in target.layout.components if c.name == "pending")
    record(target, pending, 3)[:] = 0
    got = target.step({3: ids[21:22]})[3]
    assert (got[0] - whole[21]).abs().max() > 1e-6
