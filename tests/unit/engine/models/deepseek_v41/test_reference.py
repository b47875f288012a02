import pytest
import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.reference import Reference
from tests.fakes.deepseek_configs import v4_flash_config
from tests.fakes.v41_reference import largest_difference, prompt, readable_rows, run, started, tiny, tiny_reference

torch.set_num_threads(1)
LENGTH = 101
IDS = prompt(LENGTH)
CHUNKINGS = [[7, 13, 20, 35, 26], [63, 1, 3, 8, 26], [100, 1], [1, 100], [2] * 9 + [83]]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["quantized", "plain"])
def whole(request):
    reference = tiny_reference(quantized=request.param)
    cache = started(reference, IDS)
    with torch.inference_mode():
        logits = run(reference, cache, [LENGTH])[0].logits
    return reference, cache, logits


def test_logits_are_alive(whole):
    _, _, logits = whole
    assert logits.isfinite().all()
    assert logits.std() > 0.3
    assert len(set(logits.argmax(1).tolist())) > LENGTH // 3


@pytest.mark.parametrize("sizes", CHUNKINGS, ids=lambda sizes: "-".join(map(str, sizes[:5])))
def test_chunks_of_any_sizes_equal_one_shot(whole, sizes):
    reference, expected, logits = whole
    cache = started(reference, IDS)
    got = torch.cat([result.logits for result in run(reference, cache, sizes)])
    assert (got - logits).abs().max() < 1e-9
    assert largest_difference(readable_rows(cache, tiny(), 0), readable_rows(expected, tiny(), 0)) < 1e-9


def test_single_steps_equal_one_shot():
    reference = tiny_reference()
    ids = IDS[:33]
    whole = run(reference, started(reference, ids), [33])[0].logits
    steps = run(reference, started(reference, ids), [20, *[1] * 13])
    assert (torch.cat([step.logits for step in steps]) - whole).abs().max() < 1e-9


def test_candidates_change_nothing_while_every_block_is_one(whole):
    reference, _, logits = whole
    rules = tiny().candidates
    short = rules.top_blocks * rules.block_size
    other = tiny_reference(quantized=reference is tiny_reference(quantized=True), use_candidates=False)
    got = run(other, started(other, IDS), [LENGTH])[0].logits
    assert (got[:short] - logits[:short]).abs().max() < 1e-12
    assert (got[short:] - logits[short:]).abs().max() > 1e-6


@pytest.mark.parametrize("length", [5, 50, 51])
def test_what_a_hand_over_moves_is_all_that_is_read(length):
    """The last window rows, the entries, and the pending row of an odd length: nothing else, and nothing behind."""
    reference = tiny_reference()
    source = started(reference, IDS)
    run(reference, source, [length])
    target = reference.new_cache()
    target.extend(list(IDS))
    target.length = length
    for i, window in enumerate(source.windows):
        first = max(0, length - tiny().window)
        target.windows[i].write(first, window.read(first, length))
    for i, entries in source.entries.items():
        target.entries[i].write(0, entries.read(0, length // tiny().layers[i].m))
        target.index_keys[i].write(0, source.index_keys[i].read(0, length // tiny().layers[i].m))
    if length % 2:
        for i, pending in source.pending.items():
            target.pending[i].write(length - 1, pending.read(length - 1, length))
    there = run(reference, target, [1, 1, 4], start=length)
    here = run(reference, source, [1, 1, 4], start=length)
    for left, right in zip(here, there, strict=True):
        assert (left.logits - right.logits).abs().max() == 0
    assert largest_difference(readable_rows(source, tiny(), 0), readable_rows(target, tiny(), 0)) == 0


def test_a_rollback_leaves_nothing_that_is_read_later():
    reference = tiny_reference()
    straight = started(reference, IDS[:61])
    expected = run(reference, straight, [50, 11])[-1].logits
    cache = started(reference, IDS[:50])
    run(reference, cache, [50])
    cache.extend([9, 8, 7, 6, 5])  # drafts, all to be rejected
    run(reference, cache, [5], start=50)
    cache.rewind(50)
    cache.extend(list(IDS[50:61]))
    got = run(reference, cache, [11], start=50)[-1].logits
    assert (got - expected).abs().max() == 0
    assert largest_difference(readable_rows(cache, tiny(), 0), readable_rows(straight, tiny(), 0)) == 0


def test_image_rows_replace_embeddings_and_keep_ngrams_apart():
    reference = tiny_reference()
    ids, image_id, span = list(IDS[:40]), tiny().image_token_id, range(10, 18)
    for i in span:
        ids[i] = image_id
    flags = [i in span for i in range(40)]
    rows = torch.randn(40, tiny().hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def logits(ids, sizes):
        cache = reference.new_cache()
        cache.extend(ids, flags)
        out, start = [], 0
        for size in sizes:
            out.append(reference.forward(cache, start, start + size, image_rows=rows[start : start + size]).logits)
            start += size
        return torch.cat(out)

    whole = logits(ids, [40])
    assert (logits(ids, [9, 20, 11]) - whole).abs().max() < 1e-9
    # Ids inside the span are never looked at, so n-grams behind it cannot see through it either.
    renamed = [300 + i if i in span else token for i, token in enumerate(ids)]
    assert (logits(renamed, [40]) - whole).abs().max() == 0
    rows = rows + 1e-2
    assert (logits(ids, [40])[10:] - whole[10:]).abs().max() > 1e-6


def v4_reference():
    """A V4 model with all its cache formats: overlapping and long groups, hashed experts, Hadamard-turned index keys."""
    config = parse_config(v4_flash_config() | {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 5, "moe_intermediate_size": 128,
        "num_attention_heads": 4, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 64,
        "o_groups": 2, "sliding_window": 8, "compress_ratios": [0, 0, 4, 128, 4], "num_hash_layers": 2,
        "index_n_heads": 32, "index_head_dim": 64, "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "num_nextn_predict_layers": 0,
    })  # fmt: skip
    return Reference(config, random_weights(config, 5, torch.float64), arithmetic_of(config))


def test_v4_in_chunks_equals_one_shot_with_its_cache_formats():
    reference, ids = v4_reference(), prompt(150)
    cache = started(reference, ids)
    whole = run(reference, cache, [150])[0].logits
    assert whole.isfinite().all()
    assert whole.std() > 0.3
    assert cache.entries[3].read(0, 1).isfinite().all()  # tokens 0..127
    got = torch.cat([result.logits for result in run(reference, started(reference, ids), [5, 58, 1, 66, 3, 17])])
    assert (got - whole).abs().max() < 1e-9
