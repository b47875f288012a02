import numpy as np
import pytest
import torch

from benchmarks.model_driver import ModelDriver as Driver
from core.kv import ComponentKind
from engine.models.builtin import prepare_builtin
from engine.models.registry import load_model

torch.set_num_threads(1)
NAMES = ["tiny-llama", "tiny-window"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    names = [*NAMES, *(f"{name}-f64" for name in NAMES)]
    return {name: load_model(prepare_builtin(name, cache)) for name in names}


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def last_logits(run, row, tokens, sizes):
    """Feed `tokens` to a row in chunks of the given sizes, then the rest."""
    borders = [0, *np.cumsum(sizes).tolist(), len(tokens)]
    chunks = [tokens[a:b] for a, b in zip(borders, borders[1:], strict=False) if a < b]
    return [run.step({row: chunk}) for chunk in chunks][-1][0]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_batches_and_decode_steps_agree_in_float64(models, name):
    tokens = prompt(1, 70)
    whole = last_logits(Driver(models[f"{name}-f64"]), 0, tokens, [])
    for sizes in ([1] * 70, [16, 16, 16, 16], [33, 1, 1, 30], [69]):
        run = Driver(models[f"{name}-f64"])
        torch.testing.assert_close(last_logits(run, 2, tokens, sizes), whole, atol=1e-10, rtol=0)
    run = Driver(models[f"{name}-f64"])
    run.step({0: prompt(2, 50), 1: tokens[:40], 3: prompt(3, 9)})
    mixed = run.step({3: prompt(4, 1), 1: tokens[40:], 0: prompt(5, 3)})
    torch.testing.assert_close(mixed[1], whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_logits_are_equal_to_the_bit_over_batch_sizes_and_chunkings(models, name):
    model = models[name]
    tokens = prompt(7, 37)
    alone = last_logits(Driver(model, deterministic=True), 0, tokens, [])
    for sizes in ([1] * 37, [16, 16], [5, 31], [36]):
        assert torch.equal(last_logits(Driver(model, deterministic=True), 1, tokens, sizes), alone)
    # Decode batches of 1..40 rows: the row's next logits never change a bit.
    run = Driver(model, num_rows=40, max_tokens=64, deterministic=True)
    run.step({r: tokens if r == 0 else prompt(r, 5 + r % 9) for r in range(40)})
    truth = None
    for size in range(1, 41, 3):
        run.lengths[0] = len(tokens)
        rows = [*range(40 - size + 1, 40), 0]
        if size % 2:
            rows.reverse()
        logits = run.step({r: [5] if r == 0 else [r] for r in rows})[rows.index(0)]
        truth = logits if truth is None else truth
        assert torch.equal(logits, truth)


def test_fast_mode_does_depend_on_the_batch_or_the_machine_is_invariant_anyway(models):
    # The negative control of the test above.
    tokens = prompt(7, 37)
    results = [last_logits(Driver(models["tiny-llama"]), 0, tokens, sizes) for sizes in ([], [1] * 37, [16, 16], [36])]
    if all(torch.equal(r, results[0]) for r in results):
        pytest.skip("this machine's kernels happen to be batch-invariant")
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_fast_and_deterministic_mode_agree(models, name):
    tokens = prompt(9, 61)
    fast, fixed = (Driver(models[f"{name}-f64"], deterministic=flag).greedy(0, tokens, 30) for flag in (False, True))
    assert fast == fixed


def test_float32_weights_are_the_rounded_float64_ones(models):
    tokens = prompt(11, 50)
    f32 = last_logits(Driver(models["tiny-llama"]), 0, tokens, [])
    f64 = last_logits(Driver(models["tiny-llama-f64"]), 0, tokens, [])
    torch.testing.assert_close(f32.double(), f64, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_old_tokens_matter_for_the_text(models, name):
    # The tiny model is only useful as an oracle if a wrong page changes what is said.
    tokens = prompt(13, 80)
    truth = Driver(models[name]).greedy(0, tokens, 30)
    changed = Driver(models[name])
    changed.step({0: tokens[:-1]})
    page = int(changed.tables[0][1])
    changed.kv.paged("full")[page] = changed.kv.paged("full")[int(changed.tables[0][4])]
    assert changed.greedy(0, tokens[-1:], 30) != truth


def test_the_ring_is_what_the_window_layer_reads(models):
    tokens = prompt(17, 80)
    run = Driver(models["tiny-window-f64"])
    truth = Driver(models["tiny-window-f64"]).greedy(0, tokens, 20)
    run.step({0: tokens[:-1]})
    kept = run.kv.per_row("window")[0].clone()
    run.kv.per_row("window")[1] = kept
    run.kv.per_row("window")[0] = 3.0
    wrong = run.step({0: tokens[-1:]})[0]
    run.lengths[0] -= 1
    run.kv.per_row("window")[0] = kept
    right = run.step({0: tokens[-1:]})[0]
    assert int(right.argmax()) == truth[0]
    assert (wrong - right).abs().max() > 0.01


def test_the_layout_names_layers_and_rings(models):
    layout = models["tiny-window"].kv_layout(10, 3, 16)
    full, window = layout.components
    assert (full.kind, full.layers, full.record_bytes) == (
        ComponentKind.PAGED,
        ("0", "2", "3"),
        3 * 2 * 2 * 16 * 16 * 4,
    )
    assert (window.kind, window.layers, window.capacity_tokens) == (ComponentKind.RING, ("1",), 32)
    assert (full.num_records, window.num_records) == (10, 3)
    assert layout.has_row_state
    assert not models["tiny-llama"].kv_layout(10, 3, 16).has_row_state
    assert models["tiny-llama"].kv_layout(10, 3, 16).digest() != models["tiny-llama-f64"].kv_layout(10, 3, 16).digest()


def test_zero_rows_give_zero_logits(models):
    assert Driver(models["tiny-llama"]).step({}).shape == (0, 320)


def test_rows_without_sampling_give_no_logits_but_write_kv(models):
    run = Driver(models["tiny-llama"])
    run.step({0: prompt(1, 9)})
    assert run.kv.paged("full")[int(run.tables[0][0])].abs().min() > 0
