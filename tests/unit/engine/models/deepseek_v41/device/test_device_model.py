"""The device's forward over reference ops. Computed in float64 without roundings to bfloat16 it must be the CPU's model:
to float64 rounding in logits, to the bit in what it caches.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import DeviceRows
from engine.models.deepseek_v41.device.turns import Turns
from engine.models.drafter import DraftRows
from tests.fakes.deepseek_driver import Driver, text, tiny_model
from tests.fakes.device_deepseek import WideDriver, device_model, wide

CLOSE = {"atol": 1e-8, "rtol": 0, "check_dtype": False}


def both(mode="off"):
    return Driver(tiny_model(mode=mode)), WideDriver(mode)


def same_memory(ours, theirs, row, length):
    """What later steps can read of a row: its pages' complete entries, and its rings."""
    for component in theirs.layout.components:
        name = component.name
        a, b = ((kv.paged if name == "global" else kv.per_row)(name) for kv in (ours.kv, theirs.kv))
        pages = theirs.tables[row][: length // theirs.page_tokens]
        a, b = (a[pages], b[pages]) if name == "global" else (a[row], b[row])
        torch.testing.assert_close(a, b, atol=0 if a.dtype == torch.uint8 else 1e-10, rtol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("sizes", [[7, 1, 1, 11, 1, 9], [23, 6, 1]])
def test_in_float64_every_chunking_gives_the_cpus_logits_and_bytes(sizes):
    ids = text(1, 30)
    cpu, device = both()
    want = cpu.step({1: ids})[1]
    at, got = 0, []
    for size in sizes:
        got.append(device.step({1: ids[at : at + size]})[1])
        at += size
    torch.testing.assert_close(torch.cat(got), want, **CLOSE)
    same_memory(device, cpu, 1, 30)


@pytest.mark.long
def test_in_float64_mixed_batches_and_rejected_tokens_are_the_cpus():
    streams = {r: text(r + 10, 50) for r in range(4)}
    cpu, device = both()
    for lengths in ({1: 30, 0: 9}, {0: 1, 2: 17, 1: 1}, {3: 6, 1: 6, 2: 1, 0: 6}, {2: 6, 1: 12, 0: 1}):
        chunks = {r: streams[r][cpu.rows[r].length :][:n] for r, n in lengths.items()}
        want, got = cpu.step(chunks), device.step(chunks)
        for r in lengths:
            torch.testing.assert_close(got[r], want[r], **CLOSE)
        for driver in (cpu, device):
            driver.rewind(1, max(30, driver.rows[1].length - 3))
    same_memory(device, cpu, 0, cpu.rows[0].length)


@pytest.mark.parametrize("mode", [pytest.param("mask", marks=pytest.mark.long), "compact"])
def test_in_float64_replay_floors_are_the_cpus(mode):
    ids = text(2, 58)
    cpu, device = both(mode)
    for driver in (cpu, device):
        driver.step({2: ids[:32]}, wanted={2: 1})
        driver.restart(2, ids[:24], 24, floor=24, known=58, write_from=32)
    for chunk, wanted in ((ids[24:33], 0), (ids[33:45], 0), (ids[45:58], 1), ([7], 1), ([9, 11, 12], 3)):
        want, got = (driver.step({2: chunk}, wanted={2: wanted})[2] for driver in (cpu, device))
        torch.testing.assert_close(got, want, **CLOSE)
    assert device.model.executed_rows == cpu.model.executed_rows
    a, b = (driver.last[1] for driver in (device, cpu))
    assert torch.equal(a.at, b.at)
    torch.testing.assert_close(a.values, b.values, **CLOSE)


def test_in_float64_proposals_are_the_cpus():
    ids = text(3, 40)
    found = []
    for driver in both():
        drafter = driver.model.drafter(driver.kv)
        is_device = isinstance(driver, WideDriver)
        if is_device:
            drafter._turns = Turns(driver.model.config, driver.model.device, torch.float64)
        for row, chunk in ((0, ids[:17]), (3, ids[:3]), (0, ids[17:20])):
            driver.step({row: chunk})
            with wide() if is_device else nullcontext():
                drafter.observe(*driver.last, np.array([len(chunk)], np.int32))
        wanted = DraftRows(np.array([0, 3], np.int32), np.array([ids[20], ids[3]]), np.array([20, 3]))
        with wide() if is_device else nullcontext():
            found.append(drafter.propose(wanted, lambda _, logits: logits.argmax(1)))
    assert np.array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].confidences, found[1].confidences, atol=1e-6)


def test_recorded_verify_steps_and_drafts_are_those_that_are_not_recorded():
    ids = text(4, 60)
    plain, recorded = WideDriver(), WideDriver()
    made = []

    def record(work):
        made.append(work)
        return work

    recorded.model.record = record
    found = []
    for driver in (plain, recorded):
        drafter, logits = driver.model.drafter(driver.kv), []
        # Prompts are longer than a block; then verify steps of one, three and two rows, the second with rejected tokens.
        for chunks in ({0: ids[:17], 3: ids[20:29]}, {0: ids[17:19]}, {3: [5], 0: ids[19:25]}, {0: [7], 3: [9, 11]}):
            given = driver.step(chunks)
            logits += given.values()
            with wide():
                drafter.observe(*driver.last, np.array([min(2, len(c)) for c in chunks.values()], np.int32))
            for row, chunk in chunks.items():
                driver.rewind(row, driver.rows[row].length - max(0, min(len(chunk), 6) - 2))
        lengths = np.array([driver.rows[r].length for r in (0, 3)])
        wanted = DraftRows(np.array([0, 3], np.int32), np.array([8, 12]), lengths)
        with wide():
            found.append((torch.cat(logits), drafter.propose(wanted, lambda _, scores: scores.argmax(1))))
    # Two sizes of steps, one of drafts; what is recorded is kept in float32.
    assert len(made) == 3
    (want, proposed), (got, again) = found
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0, check_dtype=False)
    assert np.array_equal(again.tokens, proposed.tokens)
    np.testing.assert_allclose(again.confidences, proposed.confidences, atol=1e-5)


def on_device(batch, rows=6, tokens=20, width=24):
    """The batch as a device executor lays it out: padded, its rows in tensors, its host arrays useless."""
    b, t, columns = len(batch.rows), len(batch.token_ids), batch.page_table.shape[1]

    def padded(values, count, fill=0):
        return torch.cat((values, values.new_full((count - len(values), *values.shape[1:]), fill)))

    q_start = padded(torch.from_numpy(batch.q_start), rows + 1, int(batch.q_start[-1]))
    table = torch.full((rows, width), 3, dtype=torch.int32)
    table[:b, :columns] = batch.page_table
    nothing = np.zeros(0, np.int32)
    return replace(
        batch,
        token_ids=padded(batch.token_ids, tokens),
        positions=padded(batch.positions, tokens),
        slots=padded(batch.slots, tokens, -1),
        page_table=table,
        history=padded(batch.history, rows, -1),
        sample_at=torch.arange(t),
        rows=nothing, q_start=nothing, seq_start=nothing, replay=None,
        device_rows=DeviceRows(
            padded(torch.from_numpy(batch.rows), rows), q_start, padded(torch.from_numpy(batch.seq_start), rows),
            max_q=int(np.diff(batch.q_start).max()), max_length=160,
        ),
    )  # fmt: skip


def test_padded_rows_on_the_device_give_what_host_rows_give_and_touch_nothing_else():
    plain, padded = Driver(device_model()), Driver(device_model())
    for driver in (plain, padded):
        driver.step({r: text(r, 9 + r) for r in range(4)})
    chunks = {2: [5, 6, 7], 0: [8], 3: [9, 10, 11, 12, 13, 14]}
    want = torch.cat(list(plain.step(chunks).values()))
    batch = on_device(padded.batch(chunks))
    with torch.inference_mode():
        got = padded.model.forward(batch, padded.kv)
    # Wider tables only add columns that nobody sees; products of other shapes may round otherwise on a CPU.
    torch.testing.assert_close(got, want, atol=0.3, rtol=0)
    assert float((got.argmax(1) == want.argmax(1)).float().mean()) >= 0.9
    for a, b in zip(padded.buffers, plain.buffers, strict=True):
        differ = np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)
        assert differ.mean() < 0.02
    untouched = padded.kv.per_row("window.decoder")[1]
    assert torch.equal(untouched, plain.kv.per_row("window.decoder")[1])


def test_only_steps_without_chunks_floors_and_host_loops_may_be_captured():
    driver = Driver(device_model())
    batch = on_device(driver.batch({0: [5], 1: [6]}))
    # References of some ops loop on the host, so the tiny model on a CPU is never ready.
    assert not driver.model.graph_ready(batch)
    driver.model._ops[batch.page_tokens] = replace(driver.model.ops(batch.page_tokens), captured=True)
    assert driver.model.graph_ready(batch)
    assert not driver.model.graph_ready(driver.batch({0: [5]}))
    long = replace(batch, device_rows=replace(batch.device_rows, max_q=7))
    assert not driver.model.graph_ready(long)
