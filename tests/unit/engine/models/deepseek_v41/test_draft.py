import numpy as np
import pytest
import torch

from engine.models.deepseek_v41.replay import ReplayRule
from engine.models.drafter import DraftRows, SpeculativeModel
from tests.fakes.deepseek_driver import Driver, Truth, reference, text, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def observed(driver, drafter, chunks, committed=None):
    """Run a step and let the drafter see it; rows keep their `committed` first tokens."""
    logits = driver.step(chunks)
    batch, captures = driver.last
    counts = {r: len(c) for r, c in chunks.items()} | (committed or {})
    with torch.inference_mode():
        drafter.observe(batch, captures, np.array([counts[r] for r in chunks], np.int32))
    for r, c in chunks.items():
        driver.rewind(r, driver.rows[r].length - len(c) + counts[r])
    return logits


def proposed(driver, drafter, anchors):
    """Greedy proposals: row -> tokens, confidences."""
    rows = list(anchors)
    wanted = DraftRows(
        rows=np.array(rows, np.int32),
        anchors=np.array([anchors[r] for r in rows], np.int64),
        lengths=np.array([driver.rows[r].length for r in rows], np.int64),
    )
    with torch.inference_mode():
        found = drafter.propose(wanted, lambda _, logits: logits.argmax(1))
    return {r: (found.tokens[i].tolist(), found.confidences[i]) for i, r in enumerate(rows)}


def expected(ids, anchor, rule=None):
    truth = Truth(reference(), rule)
    truth.run(ids)
    with torch.inference_mode():
        found = truth.model.propose(truth.cache, anchor, truth.rule)
    return found.tokens[0].tolist(), found.confidences[0].float().numpy()


def check(got, wanted):
    assert got[0] == wanted[0]
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-6)


def test_the_model_is_one_with_a_drafter(model):
    assert isinstance(model, SpeculativeModel)
    assert model.drafter(Driver(model).kv).num_drafts == model.num_drafts == 5


@pytest.mark.parametrize("length", [1, 3, 8, 21, 60])
def test_proposals_over_packed_rings_are_those_of_the_reference(model, length):
    driver, ids = Driver(model), text(1, 60)
    drafter = model.drafter(driver.kv)
    observed(driver, drafter, {0: text(2, 9), 2: ids[:length]})
    got = proposed(driver, drafter, {2: 77, 0: 5})
    check(got[2], expected(ids[:length], 77))
    check(got[0], expected(text(2, 9), 5))


def test_context_follows_chunks_steps_and_rejected_tokens(model):
    driver, ids = Driver(model), text(1, 60)
    drafter = model.drafter(driver.kv)
    observed(driver, drafter, {1: ids[:30]})
    observed(driver, drafter, {1: ids[30:31]})
    observed(driver, drafter, {1: ids[31:34] + text(5, 3), 0: text(6, 2)}, {1: 3})
    observed(driver, drafter, {1: ids[34:35] + text(7, 5)}, {1: 1})
    check(proposed(driver, drafter, {1: 77})[1], expected(ids[:35], 77))


def test_the_context_of_a_replayed_prompt_is_complete():
    model, ids = tiny_model(mode="compact"), text(1, 60)
    driver = Driver(model)
    driver.restart(1, known=60)
    drafter = model.drafter(driver.kv)
    for chunk in (ids[:30], ids[30:35], ids[35:59], ids[59:]):
        wanted = {1: int(driver.rows[1].length + len(chunk) == 60)}
        driver.step({1: chunk}, wanted)
        batch, captures = driver.last
        with torch.inference_mode():
            drafter.observe(batch, captures, np.array([len(chunk)], np.int32))
    rule = ReplayRule(mode="mask", keep=20, known_tokens=60)
    check(proposed(driver, drafter, {1: 77})[1], expected(ids, 77, rule))


def test_proposals_behind_a_floor_stay_defined(model):
    driver, ids = Driver(model), text(1, 60)
    drafter = model.drafter(driver.kv)
    driver.restart(3, ids[:40], 40, floor=40, write_from=40)
    observed(driver, drafter, {3: ids[40:42]})
    tokens, confidences = proposed(driver, drafter, {3: 77})[3]
    assert all(0 <= token < 512 for token in tokens)
    assert np.isfinite(confidences).all()
