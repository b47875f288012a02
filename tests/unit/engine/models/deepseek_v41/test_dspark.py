"""Drafting and verifying on the dense reference: speculation decides how fast a text comes, never which text."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.reference import Reference
from engine.models.deepseek_v41.replay import COMPACT, ReplayRule
from engine.philox import gumbel
from engine.plan import RowInit
from engine.sampling import Sampler
from engine.speculation.acceptance import NO_DRAFT, ChainRule, Judged, accept_runs
from tests.fakes.v41_reference import (
    DRAFTS,
    largest_difference,
    prompt,
    readable_rows,
    run,
    started,
    tiny,
    tiny_reference,
    tiny_weights,
    token_map,
)

torch.set_num_threads(1)
PROMPT = prompt(30)
OUTPUTS = 18
WHOLE = ReplayRule()


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def greedy(logits, position):
    return int(logits.argmax())


def seeded(logits, position):
    """A20 at temperature 0.8 with a fixed seed."""
    noise = gumbel(np.arange(len(logits)), 1234, position, 0)
    return int(np.argmax(logits.numpy() / 0.8 + noise))


def plain_text(reference, choose, rule=WHOLE):
    """Return OUTPUTS tokens, one at a time, and the cache before the last of them."""
    cache = started(reference, PROMPT)
    result = run(reference, cache, [len(PROMPT)], rule)[0]
    out = [choose(result.logits[-1], len(PROMPT))]
    while len(out) < OUTPUTS:
        at = cache.length
        cache.extend([out[-1]])
        out.append(choose(reference.forward(cache, at, at + 1, rule).logits[-1], at + 1))
    return out, cache


def speculative_text(reference, choose, draft, rule=WHOLE):
    """As `plain_text`; `draft(cache, out)` gives the drafts behind the last token. Also return the accepted counts."""
    cache = started(reference, PROMPT)
    result = run(reference, cache, [len(PROMPT)], rule)[0]
    out, accepted = [choose(result.logits[-1], len(PROMPT))], []
    while len(out) < OUTPUTS:
        at = cache.length
        drafts = draft(cache, out)[: OUTPUTS - len(out) - 1]
        cache.extend([out[-1], *drafts])
        logits = reference.forward(cache, at, at + 1 + len(drafts), rule).logits
        count = 0
        for i in range(len(drafts) + 1):
            out.append(choose(logits[i], at + 1 + i))
            if i == len(drafts) or out[-1] != drafts[i]:
                break
            count += 1
        accepted.append(count)
        cache.rewind(at + 1 + count)
    return out, cache, accepted


@pytest.mark.parametrize("choose", [greedy, seeded], ids=["greedy", "seeded"])
@pytest.mark.parametrize("rule", [WHOLE, ReplayRule(mode=COMPACT, keep=13, known_tokens=30)], ids=["whole", "replay"])
def test_speculative_text_and_state_equal_plain_under_any_schedule(choose, rule):
    reference = tiny_reference()
    expected, straight = plain_text(reference, choose, rule)
    pick = random.Random(8)

    def draft(cache, out):
        """Proposals of the draft model with right tokens mixed in, and a random number of them."""
        proposed = reference.propose(cache, out[-1], rule).tokens[0].tolist()
        wished = expected[len(out) : len(out) + DRAFTS]
        mixed = [right if pick.random() < 0.85 else other for right, other in zip(wished, proposed, strict=False)]
        return mixed[: pick.randint(0, DRAFTS)]

    out, cache, accepted = speculative_text(reference, choose, draft, rule)
    assert out == expected
    assert 0 in accepted and max(accepted) >= 3  # noqa: PT018
    assert cache.ids == straight.ids
    rows = [readable_rows(c, tiny(), rule.floor, rule.decoder_floor) for c in (cache, straight)]
    assert largest_difference(*rows) < 1e-9


def test_drafts_are_the_same_however_the_context_was_written():
    reference = tiny_reference()
    proposals = []
    for sizes in ([30], [29, 1], [7, 13, 10]):
        cache = started(reference, PROMPT)
        run(reference, cache, sizes)
        proposals.append(reference.propose(cache, 77, WHOLE))
    for other in proposals[1:]:
        assert torch.equal(other.tokens, proposals[0].tokens)
        assert (other.logits - proposals[0].logits).abs().max() < 1e-9
        assert (other.confidences - proposals[0].confidences).abs().max() < 1e-9


def forced(tokens):
    return lambda i, logits: torch.full((logits.shape[0],), tokens[i])


def test_a_confidence_does_not_depend_on_the_token_it_is_about():
    reference = tiny_reference()
    cache = started(reference, PROMPT)
    run(reference, cache, [30])
    base = [10, 20, 30, 40, 50]
    first = reference.propose(cache, 77, WHOLE, forced(base))
    for i in range(DRAFTS):
        other = reference.propose(cache, 77, WHOLE, forced([99 if k == i else token for k, token in enumerate(base)]))
        changed = (other.confidences != first.confidences)[0].tolist()
        assert changed == [k == i + 1 for k in range(DRAFTS)]
        # The Markov head: a token moves the logits of the next one only.
        moved = (other.logits != first.logits).any(2)[0].tolist()
        assert moved == [k == i + 1 for k in range(DRAFTS)]


def test_attention_inside_the_block_looks_both_ways():
    """The noise tokens behind the anchor reach the anchor's own row."""
    reference = tiny_reference()
    cache = started(reference, PROMPT)
    run(reference, cache, [30])
    weights = tiny_weights()
    embed = weights.embed.clone()
    embed[tiny().dspark.noise_token_id] *= -1
    other = Reference(tiny(), dataclasses.replace(weights, embed=embed), arithmetic_of(tiny()), token_map())
    difference = (reference.propose(cache, 77, WHOLE).logits - other.propose(cache, 77, WHOLE).logits)[0, 0]
    assert difference.abs().max() > 1e-3


def test_a_sequence_shorter_than_a_window_drafts_from_what_there_is():
    reference = tiny_reference()
    cache = started(reference, PROMPT[:1])
    run(reference, cache, [1])
    proposal = reference.propose(cache, PROMPT[1], WHOLE)
    assert proposal.tokens.shape == (1, DRAFTS)
    assert proposal.logits.isfinite().all()
    assert ((proposal.confidences > 0) & (proposal.confidences < 1)).all()


SMALL_VOCABULARY = 16
TRIALS = 1500


def small_model():
    fields = tiny_config(256)
    fields["text_config"] |= {
        "vocab_size": SMALL_VOCABULARY,
        "dspark_noise_token_id": SMALL_VOCABULARY - 1,
        "engram_compressed_vocab_size": 10,
    }
    fields["image_token_id"] = None
    fields.pop("vision_config")
    config = parse_config(fields)
    return Reference(
        config, random_weights(config, 3, torch.float64), arithmetic_of(config), token_map(SMALL_VOCABULARY) % 10
    )


def pearson(counts, probabilities, trials):
    """Return the statistic and its degrees of freedom, with rare cells put together."""
    expected = probabilities * trials
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return (((counts - expected) ** 2)[keep] / expected[keep]).sum(), keep.sum() - 1


def test_chain_rule_tokens_have_the_targets_distribution():
    """Two drafts over 16 tokens: the first two tokens that stand, against plain sampling's exact probabilities."""
    reference, ids, temperature = small_model(), [3, 5, 7, 1, 4, 9, 2, 8, 6, 11, 12, 3], 1.3
    size, at = SMALL_VOCABULARY, len(ids) - 1
    cache = started(reference, ids)
    run(reference, cache, [at])
    draft_first = reference.propose(cache, ids[-1], WHOLE, forced([0] * DRAFTS)).logits[0, 0]
    draft_second = torch.stack(
        [reference.propose(cache, ids[-1], WHOLE, forced([v] * DRAFTS)).logits[0, 1] for v in range(size)]
    )
    first, second = None, []
    for v in range(size):
        cache.rewind(at)
        cache.extend([ids[-1], v])
        first, after = reference.forward(cache, at, at + 2).logits
        second.append(after)
    second = torch.stack(second)

    sampler = Sampler(TRIALS, size)
    rule, rows = ChainRule(sampler), np.arange(TRIALS, dtype=np.int32)
    for row in range(TRIALS):
        params = SamplingParams(temperature=temperature, seed=row + 10_000)
        sampler.set_row(
            RowInit(
                row=row,
                generation=0,
                sampling=params,
                token_ids=b"",
                num_prompt_tokens=0,
                min_tokens=0,
                masked_until_min=(),
            )  # fmt: skip
        )
    positions = np.full(TRIALS, at + 1, np.int64)
    drafts = np.full((TRIALS, 3), NO_DRAFT, np.int64)
    drafts[:, 0] = rule.choose(0, draft_first.repeat(TRIALS, 1).numpy(), rows, positions)
    drafts[:, 1] = rule.choose(1, draft_second[drafts[:, 0]].numpy(), rows, positions + 1)
    # Row 2's logits would judge the bonus behind the second draft, which is not looked at here.
    logits = torch.stack((first.repeat(TRIALS, 1), second[drafts[:, 0]], second[drafts[:, 1]]), 1).flatten(0, 1)
    judged = accept_runs(rule, logits, Judged(rows, np.arange(TRIALS, dtype=np.int64) * 3, positions, drafts))

    p_first = (first / temperature).softmax(0).numpy()
    p_second = (second / temperature).softmax(1).numpy()
    tokens, count = judged.tokens, judged.count
    statistic, freedom = pearson(np.bincount(tokens[:, 0], minlength=size), p_first, TRIALS)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    # Whether a second token stands depends on the first one only through its acceptance, so condition on the first.
    two = tokens[count >= 2]
    assert 100 < len(two) < TRIALS
    weight = np.bincount(two[:, 0], minlength=size)
    mixture = (weight[:, None] * p_second).sum(0) / len(two)
    statistic, freedom = pearson(np.bincount(two[:, 1], minlength=size), mixture, len(two))
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    # The test can fail: the drafts themselves are far from that distribution.
    statistic, freedom = pearson(np.bincount(drafts[:, 0], minlength=size), p_first, TRIALS)
    assert statistic > 10 * freedom
