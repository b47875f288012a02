"""A device chooses what the host chooses for the same logits, ties and borders included."""

import itertools

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from engine.plan import RowInit
from engine.runner.device_sampler import DeviceSampler
from engine.runner.device_stream import ImmediateStream
from engine.sampling import Sampler

VOCAB = 1100


def rows_of(params):
    sampler = Sampler(len(params), VOCAB)
    for row, one in enumerate(params):
        init = RowInit(
            row=row, generation=0, sampling=one, token_ids=b"", num_prompt_tokens=0, min_tokens=0, masked_until_min=()
        )
        sampler.set_row(init)
    return sampler, np.arange(len(params), dtype=np.int32)


def logits_of(kind, rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    flat = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    # Rounded ones tie; with holes, as a mask leaves them.
    values = {"spread": flat * 3, "tied": (flat * 2).round(), "holes": torch.where(flat > 0.4, flat, -torch.inf)}
    return values[kind].to(dtype)


PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=7 + n, sample_index=n % 3)
    for n, (t, k, p, m) in enumerate(itertools.product((0.0, 0.7, 1.6), (0, 1, 40), (1.0, 0.5, 0.95), (0.0, 0.1)))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["spread", "tied", "holes"])
def test_tokens_are_those_of_the_host(kind, dtype):
    sampler, rows = rows_of(PARAMS)
    device = DeviceSampler(len(PARAMS), VOCAB, ImmediateStream())
    logits = logits_of(kind, len(PARAMS), dtype)
    seen = set()
    for position in (0, 5, 70_000):
        positions = np.full(len(rows), position, np.int64)
        want = sampler.sample(logits, rows, positions).tokens
        got = device.choose(logits, sampler.params(rows), positions).tokens
        assert got.tolist() == want.tolist()
        seen.add(tuple(want.tolist()))
    assert len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_those_of_the_host(dtype):
    params = [SamplingParams(temperature=0.0, num_logprobs=n) for n in (-1, 0, 3, 8)]
    sampler, rows = rows_of(params)
    logits = logits_of("tied", 4, dtype)
    positions = np.zeros(4, np.int64)
    want = sampler.sample(logits, rows, positions)
    got = DeviceSampler(4, VOCAB, ImmediateStream()).choose(logits, sampler.params(rows), positions)
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_allclose(got.logprobs[:, 0], want.logprobs[1:], atol=1e-6)
    for i, n in ((2, 3), (3, 8)):
        assert got.top_tokens[i - 1, :n].tolist() == want.top_tokens[i, :n].tolist()
        np.testing.assert_allclose(got.logprobs[i - 1, 1 : 1 + n], want.top_logprobs[i, :n], atol=1e-6)


def test_rows_with_rules_that_only_the_host_knows_are_named():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
    ]
    sampler, rows = rows_of(params)
    masked = RowInit(
        row=0, generation=0, sampling=params[0], token_ids=b"", num_prompt_tokens=4, min_tokens=2, masked_until_min=(9,)
    )
    sampler.set_row(masked)
    assert sampler.on_host(rows, np.full(3, 5, np.int64)).tolist() == [True, True, True]
    assert sampler.on_host(rows, np.full(3, 6, np.int64)).tolist() == [False, True, True]
