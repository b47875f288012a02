"""The dense reference against a second reading of the formulas, row by row: what has no public implementation."""

import pytest
import torch

from engine.models.deepseek_v41.replay import ReplayRule
from tests.fakes.v41_reference import prompt, run, started, tiny, tiny_reference, tiny_weights, token_map
from tests.fakes.v41_spelled import Spelled

torch.set_num_threads(1)
LENGTH = 23
"""Beyond a window, beyond top-k entries, and beyond the candidate blocks of the decoder."""


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_logits_and_drafts_equal_those_of_the_spelled_out_pass(quantized):
    ids = list(prompt(LENGTH, seed=3))
    reference = tiny_reference(quantized=quantized)
    spelled = Spelled(tiny(), tiny_weights(), token_map(), quantized=quantized)
    with torch.inference_mode():
        cache = started(reference, ids)
        got = run(reference, cache, [LENGTH])[0].logits
        expected, captures = spelled.forward(ids)
        assert (got - expected).abs().max() < 1e-9
        proposal = reference.propose(cache, 55, ReplayRule())
        tokens, confidences = spelled.draft(captures, 55)
    assert proposal.tokens[0].tolist() == tokens
    assert (proposal.confidences[0] - torch.tensor(confidences, dtype=torch.float64)).abs().max() < 1e-9


def test_rows_of_an_image_equal_those_of_the_spelled_out_pass():
    ids, count = list(prompt(12, seed=4)), 12
    images = [3 <= i < 7 for i in range(count)]
    rows = torch.randn(count, tiny().hidden_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reference = tiny_reference()
    with torch.inference_mode():
        cache = reference.new_cache()
        cache.extend(ids, images)
        got = reference.forward(cache, 0, count, image_rows=rows).logits
        expected, _ = Spelled(tiny(), tiny_weights(), token_map(), quantized=True).forward(ids, images, rows)
    assert (got - expected).abs().max() < 1e-9
