import itertools

import numpy as np
import pytest
import torch

from engine.models.deepseek_v41 import paged_attention, paged_index, tiles
from tests.fakes.deepseek_driver import Driver, Truth, reference, text, tiny_model

CLOSE = {"atol": 1e-9, "rtol": 0}
WINDOW, KEEP = 8, 20
CHUNKINGS = [[60], [7, 1, 1, 13, 20, 1, 17], [1] * 9 + [51], [59, 1], [16, 16, 16, 12], [33, 6, 6, 6, 9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def truth():
    ids = text(1, 60)
    return ids, Truth(reference()).run(ids)


def feed(driver, row, ids, sizes):
    """Logits of every token, fed in chunks."""
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(ids)
    return torch.cat([driver.step({row: ids[b - n : b]})[row] for n, b in zip(sizes, ends, strict=True)])


@pytest.mark.parametrize("sizes", CHUNKINGS)
def test_packed_pages_give_what_the_dense_reference_gives_in_any_chunking(model, truth, sizes):
    ids, whole = truth
    driver = Driver(model, seed=len(sizes), deterministic=len(sizes) % 2 == 0)
    torch.testing.assert_close(feed(driver, len(sizes) % 4, ids, sizes), whole, **CLOSE)


def test_mixed_batches_give_every_row_what_it_gets_alone(model, truth):
    ids, whole = truth
    others = {r: text(r + 10, 50) for r in (0, 2, 3)}
    alone = {r: Truth(reference()).run(others[r]) for r in others}
    driver = Driver(model)
    got = {r: [] for r in (0, 1, 2, 3)}
    streams = {**others, 1: ids}
    # Prompt chunks, decode rows and verify rows side by side, in changing order.
    for lengths in ({1: 30, 0: 9}, {0: 1, 2: 17, 1: 1}, {3: 6, 1: 6, 2: 1, 0: 6}, {2: 6, 1: 12, 0: 1}, {1: 11, 3: 20}):
        chunks = {r: streams[r][driver.rows[r].length :][:n] for r, n in lengths.items()}
        for r, logits in driver.step(chunks).items():
            got[r].append(logits)
    torch.testing.assert_close(torch.cat(got[1]), whole, **CLOSE)
    for r in others:
        found = torch.cat(got[r])
        torch.testing.assert_close(found, alone[r][: len(found)], **CLOSE)


def test_nothing_of_a_former_owner_of_row_and_pages_is_read(model, truth):
    ids, whole = truth
    driver = Driver(model)
    feed(driver, 1, text(5, 99), [99])
    driver.restart(1)
    torch.testing.assert_close(feed(driver, 1, ids, [20, 1, 6, 33]), whole, **CLOSE)


def test_rejected_tokens_leave_no_trace(model, truth):
    ids, whole = truth
    driver, got = Driver(model), []
    got.append(driver.step({0: ids[:21]})[0])
    generator = np.random.default_rng(4)
    while (length := driver.rows[0].length) < len(ids):
        accepted = min(int(generator.integers(1, 7)), len(ids) - length)
        wrong = text(int(generator.integers(1000)), 6 - accepted)
        got.append(driver.step({0: ids[length : length + accepted] + wrong})[0][:accepted])
        driver.rewind(0, length + accepted)
    torch.testing.assert_close(torch.cat(got), whole, **CLOSE)


def test_deterministic_logits_are_equal_to_the_bit_in_any_batch_and_chunking():
    model, ids = tiny_model(torch.float32), text(1, 44)
    alone = feed(Driver(model, deterministic=True), 0, ids, [44])
    for sizes in ([7, 1, 1, 13, 20, 2], [33, 6, 5]):
        assert torch.equal(feed(Driver(model, deterministic=True), 2, ids, sizes), alone)
    driver = Driver(model, num_rows=18, max_tokens=48, deterministic=True)
    lengths = {r: 2 + 2 * r for r in range(1, 18)}
    driver.step({0: ids[:41], **{r: text(r, n) for r, n in lengths.items()}}, wanted=dict.fromkeys(range(18), 1))
    for size in (1, 2, 14, 18):
        driver.rewind(0, 41)
        rows = [*range(18 - size + 1, 18), 0]
        if size % 4:
            rows.reverse()
        got = driver.step({r: ids[41:44] if r == 0 else [r] for r in rows})[0]
        assert torch.equal(got, alone[41:44])


def test_float32_serves_what_float64_means(truth):
    ids, whole = truth
    got = feed(Driver(tiny_model(torch.float32)), 0, ids, [60])
    agree = (got.argmax(1) == whole.argmax(1)).float().mean()
    assert agree > 0.8
    assert got.dtype is torch.float32


def test_budgets_of_memory_change_nothing(truth, monkeypatch):
    ids, whole = truth
    monkeypatch.setattr(paged_index, "_SCORE_BYTES", 4096)
    monkeypatch.setattr(paged_attention, "_SHARED_BYTES", 0)
    monkeypatch.setattr(tiles, "_FREE_ROWS", 16)
    driver = Driver(tiny_model())
    driver.step({r: text(r, 20 + r) for r in (0, 2)})
    got = [driver.step({1: ids[:50], 0: [5]})[1], driver.step({0: [7], 1: ids[50:51], 2: [9]})[1]]
    got.append(driver.step({2: [1] * 9, 1: ids[51:]})[1])
    torch.testing.assert_close(torch.cat(got), whole, **CLOSE)
