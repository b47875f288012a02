import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.philox import gumbel
from engine.plan import RowInit
from engine.sampling import Sampler

torch.set_num_threads(1)


def row_init(row, params, tokens=(1, 2), num_prompt=None, min_tokens=0, masked=()):
    return RowInit(
        row=row,
        generation=1,
        sampling=params,
        token_ids=np.array(tokens, np.int32).tobytes(),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        min_tokens=min_tokens,
        masked_until_min=masked,
    )


def sample_one(logits, params, position=5, **init):
    sampler = Sampler(1, len(logits))
    sampler.set_row(row_init(0, params, **init))
    return sampler.sample(torch.tensor([logits]), np.zeros(1, np.int32), np.array([position]))


def naive(logits, params, position, prompt=(), outputs=(), min_tokens=0, masked=()):
    """The whole definition in plain Python over floats, no pruning, no vectors."""
    z = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        z[token] += bias
    if len(outputs) < min_tokens:
        for token in masked:
            z[token] = -math.inf
    for token in {*prompt, *outputs}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(outputs):
        z[token] -= params.frequency_penalty * list(outputs).count(token) + params.presence_penalty
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    if params.temperature < 1e-5:
        return order[0]
    z = [x / params.temperature for x in z]
    if params.min_p:
        order = [v for v in order if z[v] >= z[order[0]] + math.log(params.min_p)]
    order = [v for v in order if z[v] > -math.inf]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(z[v] - z[order[0]]) for v in order]
        goal, mass, keep = params.top_p * sum(weights), 0.0, 0
        while keep < len(order) and mass < goal:
            mass += weights[keep]
            keep += 1
        order = order[:keep]
    noise = gumbel(np.arange(len(z)), params.seed, position, params.sample_index)
    return max(order, key=lambda v: (z[v] + noise[v], -v))


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, 2.5, 100.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 5),
)
tokens_strategy = st.lists(st.integers(0, 39), min_size=0, max_size=8)


@given(
    params=params_strategy,
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=8),
    outputs=tokens_strategy,
    min_tokens=st.sampled_from([0, 2, 6]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_every_rule_equals_the_plain_definition(params, prompt, outputs, min_tokens, seed):
    # A coarse grid makes ties common.
    logits = (np.random.default_rng(seed).integers(-12, 12, 40) / 2).tolist()
    masked = (3, 17)
    position = len(prompt) + len(outputs)
    sampler = Sampler(3, 40)
    sampler.set_row(row_init(2, params, prompt + outputs, len(prompt), min_tokens, masked))
    history = list(outputs)
    for step in range(3):
        raw = torch.tensor([logits], dtype=torch.float64).roll(step, 1)
        out = sampler.sample(raw, np.array([2], np.int32), np.array([position + step]))
        truth = naive(raw[0].tolist(), params, position + step, prompt, history, min_tokens, masked)
        assert out.tokens.tolist() == [truth]
        history.append(truth)


def test_pruned_noise_equals_noise_for_the_whole_vocabulary():
    generator = np.random.default_rng(1)
    vocab = 20_000
    for spread in (0.0, 0.5, 3.0, 12.0):
        logits = (generator.standard_normal(vocab) * spread).astype(np.float32)
        sampler = Sampler(1, vocab)
        sampler.set_row(row_init(0, SamplingParams(seed=77, temperature=0.8)))
        for position in range(4):
            scaled = (logits / np.float32(0.8)).astype(np.float64)
            truth = int(np.argmax(scaled + gumbel(np.arange(vocab), 77, position, 0)))
            out = sampler.sample(torch.from_numpy(logits)[None], np.zeros(1, np.int32), np.array([position]))
            assert out.tokens.tolist() == [truth]


def test_temperature_zero_takes_the_lowest_of_equal_logits():
    assert sample_one([0.0, 5.0, 5.0, 1.0], SamplingParams(temperature=0)).tokens.tolist() == [1]
    biased = SamplingParams(temperature=0, logit_bias={0: 5.0})
    assert sample_one([0.0, 5.0, 5.0, 1.0], biased).tokens.tolist() == [0]


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(), range(8)),
        (SamplingParams(temperature=0.5), range(8)),
        (SamplingParams(top_k=4), [4, 5, 6, 7]),
        (SamplingParams(top_p=0.7), [5, 6, 7]),
    ],
)
def test_drawn_tokens_have_the_asked_distribution(params, allowed):
    logits = np.linspace(0, 3, 8)
    rows = 500
    sampler = Sampler(rows, 8)
    for row in range(rows):
        fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        sampler.set_row(row_init(row, SamplingParams(**fields, seed=row * 7919 + 1)))
    counts = np.zeros(8)
    batch = torch.from_numpy(logits).expand(rows, 8)
    for position in range(12):
        out = sampler.sample(batch, np.arange(rows, dtype=np.int32), np.full(rows, position))
        counts += np.bincount(out.tokens, minlength=8)
    allowed = list(allowed)
    weights = np.exp(logits[allowed] / params.temperature)
    assert counts.sum() == counts[allowed].sum()
    # 99.99 % quantile of chi-square with 7 degrees of freedom is 29.9.
    assert chi_square(counts[allowed], weights / weights.sum()) < 29.9


def test_a_row_does_not_depend_on_its_batch_mates_or_their_order():
    generator = np.random.default_rng(5)
    count, vocab = 24, 3000
    logits = torch.from_numpy(generator.standard_normal((count, vocab)).astype(np.float32) * 3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "num_logprobs": 3},
        {"repetition_penalty": 1.2, "top_k": 20},
        {"min_p": 0.1, "logit_bias": {5: 3.0}},
    ]
    inits = [row_init(r, SamplingParams(seed=r + 1, **kinds[r % 4]), tokens=(r, r + 1, 9)) for r in range(count)]
    whole = Sampler(count, vocab)
    for init in inits:
        whole.set_row(init)
    positions = np.arange(100, 100 + count)
    together = whole.sample(logits, np.arange(count, dtype=np.int32), positions)
    order = generator.permutation(count)
    mixed = Sampler(count, vocab)
    for init in reversed(inits):
        mixed.set_row(init)
    shuffled = mixed.sample(logits[torch.from_numpy(order)], order.astype(np.int32), positions[order])
    assert shuffled.tokens.tolist() == together.tokens[order].tolist()
    for row in range(count):
        alone = Sampler(count, vocab)
        alone.set_row(inits[row])
        out = alone.sample(logits[row : row + 1], np.array([row], np.int32), positions[row : row + 1])
        assert out.tokens[0] == together.tokens[row]
        if out.logprobs is not None:
            assert out.logprobs[0] == together.logprobs[row]


def test_penalties_count_sampled_tokens_across_steps():
    sampler = Sampler(2, 4)
    sampler.set_row(row_init(1, SamplingParams(temperature=0, frequency_penalty=1.0), tokens=(3,)))
    logits = torch.tensor([[1.0, 0.5, 0.0, 2.9]])
    said = [int(sampler.sample(logits, np.array([1], np.int32), np.array([p])).tokens[0]) for p in range(1, 7)]
    # The prompt's 3 does not count; each saying costs one.
    assert said == [3, 3, 0, 3, 1, 0]


def test_a_new_owner_inherits_nothing_from_the_last_one():
    sampler = Sampler(1, 4)
    everything = SamplingParams(
        temperature=0.5, top_k=1, logit_bias={0: 50.0}, repetition_penalty=2.0, num_logprobs=2, seed=3
    )
    sampler.set_row(row_init(0, everything, min_tokens=9, masked=(2,)))
    sampler.set_row(row_init(0, SamplingParams(temperature=0)))
    out = sampler.sample(torch.tensor([[0.0, 1.0, 7.0, 2.0]]), np.zeros(1, np.int32), np.array([2]))
    assert out.tokens.tolist() == [2]
    assert out.logprobs is None


def test_histograms_are_reused_and_start_empty():
    sampler = Sampler(64, 16)
    penalized = SamplingParams(temperature=0, repetition_penalty=3.0, presence_penalty=2.0)
    logits = torch.tensor([[1.0 if v == 5 else 0.5 if v == 6 else 0.0 for v in range(16)]])
    for row in range(64):
        sampler.set_row(row_init(row, penalized))
        assert sampler.sample(logits, np.array([row], np.int32), np.array([2])).tokens.tolist() == [5]
        sampler.set_row(row_init(row, SamplingParams(temperature=0)))
    assert len(sampler._counts._outputs) <= 4


def test_logprobs_are_those_of_the_raw_logits():
    logits = [0.5, 2.0, -1.0, 2.0, 0.0]
    params = SamplingParams(temperature=0, num_logprobs=3, logit_bias={2: 100.0})
    out = sample_one(logits, params)
    truth = torch.tensor(logits).log_softmax(0)
    assert out.tokens.tolist() == [2]
    assert out.logprobs[0] == pytest.approx(truth[2].item(), abs=1e-6)
    assert out.top_tokens.tolist() == [[1, 3, 0]]
    assert out.top_logprobs[0].tolist() == pytest.approx(truth[[1, 3, 0]].tolist(), abs=1e-6)


def test_rows_that_did_not_ask_for_logprobs_hold_blanks():
    sampler = Sampler(3, 4)
    sampler.set_row(row_init(0, SamplingParams(temperature=0)))
    sampler.set_row(row_init(1, SamplingParams(temperature=0, num_logprobs=2)))
    sampler.set_row(row_init(2, SamplingParams(temperature=0, num_logprobs=0)))
    out = sampler.sample(torch.eye(4)[:3], np.arange(3, dtype=np.int32), np.full(3, 2))
    assert np.isnan(out.logprobs).tolist() == [True, False, False]
    assert out.top_tokens[0].tolist() == [-1, -1]
    assert (out.top_tokens[1] >= 0).all()
    assert out.top_tokens[2].tolist() == [-1, -1]


def test_end_ids_are_masked_below_min_tokens_only():
    params = SamplingParams(temperature=0)
    logits = [0.0, 3.0, 9.0]
    masked = {"tokens": (0, 0, 1), "num_prompt": 2, "min_tokens": 3, "masked": (2,)}
    assert sample_one(logits, params, position=3, **masked).tokens.tolist() == [1]
    assert sample_one(logits, params, position=4, **masked).tokens.tolist() == [1]
    assert sample_one(logits, params, position=5, **masked).tokens.tolist() == [2]


def test_logits_are_not_modified():
    logits = torch.randn(1, 50)
    before = logits.clone()
    sampler = Sampler(1, 50)
    sampler.set_row(row_init(0, SamplingParams(repetition_penalty=1.5, logit_bias={1: 4.0}, temperature=0.4)))
    sampler.sample(logits, np.zeros(1, np.int32), np.array([2]))
    assert torch.equal(logits, before)


def test_no_rows_are_legal():
    out = Sampler(2, 7).sample(torch.zeros(0, 7), np.zeros(0, np.int32), np.zeros(0, np.int64))
    assert out.tokens.shape == (0,)
