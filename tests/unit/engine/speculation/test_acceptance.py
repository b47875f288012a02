import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.philox import RESIDUAL_STREAM
from engine.plan import RowInit
from engine.runner.device_sampler import DeviceSampler
from engine.runner.device_stream import ImmediateStream
from engine.sampling import Sampler
from engine.speculation import acceptance
from engine.speculation.acceptance import NO_DRAFT, ChainRule, Judged, SharedNoise, accept_runs

torch.set_num_threads(1)
VOCAB = 7


def row_init(row, params, masked=(), min_tokens=0):
    return RowInit(
        row=row,
        generation=0,
        sampling=params,
        token_ids=np.array([1, 2], np.int32).tobytes(),
        num_prompt_tokens=2,
        min_tokens=min_tokens,
        masked_until_min=masked,
    )


def sampler_of(*params, masked=(), min_tokens=0):
    sampler = Sampler(len(params), VOCAB)
    for row, one in enumerate(params):
        sampler.set_row(row_init(row, one, masked, min_tokens))
    return sampler


def logits_of(*tokens):
    """Logits that make one token after the other the greedy choice."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).double() * 9


def judged_of(drafts, positions=None):
    drafts = np.array(drafts, np.int64)
    counts = (drafts != NO_DRAFT).sum(axis=1) + 1
    rows = np.arange(len(drafts), dtype=np.int32)
    positions = np.full(len(drafts), 2) if positions is None else np.array(positions)
    return Judged(rows, np.cumsum(counts) - counts, positions, drafts)


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("rule", [SharedNoise, ChainRule])
def test_a_greedy_row_keeps_right_drafts_and_one_token_more(rule):
    run = accept_runs(rule(sampler_of(GREEDY)), logits_of(3, 4, 5), judged_of([[3, 4, NO_DRAFT]]))
    assert run.tokens.tolist() == [[3, 4, 5]]
    assert run.count.tolist() == [3]


@pytest.mark.parametrize("rule", [SharedNoise, ChainRule])
def test_the_first_wrong_draft_is_replaced_and_nothing_behind_it_counts(rule):
    run = accept_runs(rule(sampler_of(GREEDY)), logits_of(3, 4, 5), judged_of([[3, 6, NO_DRAFT]]))
    assert run.tokens.tolist() == [[3, 4, -1]]
    assert run.count.tolist() == [2]


def test_rows_of_different_lengths_are_judged_side_by_side():
    run = accept_runs(
        SharedNoise(sampler_of(GREEDY, GREEDY, GREEDY)),
        logits_of(3, 4, 5, 6, 1, 2),
        judged_of([[3, 4, NO_DRAFT], [NO_DRAFT] * 3, [1, NO_DRAFT, NO_DRAFT]]),
    )
    assert run.tokens.tolist() == [[3, 4, 5], [6, -1, -1], [1, 2, -1]]
    assert run.count.tolist() == [3, 1, 2]


def test_histograms_count_what_stands_and_never_a_rejected_draft():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sampler = sampler_of(params)
    accept_runs(SharedNoise(sampler), logits_of(3, 4, 5), judged_of([[3, 6, NO_DRAFT]]))
    assert sampler._counts.outputs(0).tolist() == [0, 0, 0, 1, 1, 0, 0]


def test_a_penalty_sees_the_accepted_drafts_before_it():
    # Each repetition costs 2: the third 3 in a row is no longer the best.
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(3, VOCAB).double()
    logits[:, 3], logits[:, 5] = 3.0, 1.5
    run = accept_runs(SharedNoise(sampler_of(params)), logits, judged_of([[3, 3, NO_DRAFT]]))
    assert run.tokens.tolist() == [[3, 5, -1]]


def test_stop_ids_are_masked_by_the_position_of_each_token():
    sampler = sampler_of(GREEDY, masked=(3,), min_tokens=2)
    logits = logits_of(3, 3, 3)
    logits[:, 4] = 5.0
    run = accept_runs(SharedNoise(sampler), logits, judged_of([[4, 4, NO_DRAFT]]))
    assert run.tokens.tolist() == [[4, 4, 3]]


def test_log_probabilities_come_for_every_token_that_stands():
    sampler = sampler_of(SamplingParams(temperature=0.0, num_logprobs=1), GREEDY)
    run = accept_runs(SharedNoise(sampler), logits_of(3, 4, 5, 6), judged_of([[3, 6, NO_DRAFT], [NO_DRAFT] * 3]))
    assert np.isfinite(run.logprobs).tolist() == [[True, True, False], [False, False, False]]
    assert run.top_tokens[0, :, 0].tolist() == [3, 4, -1]


def test_shared_noise_gives_the_tokens_of_a_run_without_drafts_whatever_is_drafted():
    params = SamplingParams(temperature=1.1, seed=9, top_p=0.9)
    rng = np.random.default_rng(0)
    for case in range(40):
        logits = torch.from_numpy(rng.normal(size=(4, VOCAB)) * 2)
        alone = sampler_of(params)
        truth = [
            int(alone.sample(logits[i : i + 1], np.zeros(1, np.int32), np.array([10 + i])).tokens[0]) for i in range(4)
        ]
        drafts = [t if rng.random() < 0.7 else int(rng.integers(VOCAB)) for t in truth[:3]]
        run = accept_runs(SharedNoise(sampler_of(params)), logits, judged_of([[*drafts, NO_DRAFT]], [10]))
        right = next((i for i in range(3) if drafts[i] != truth[i]), 3)
        assert run.count[0] == right + 1, case
        assert run.tokens[0, : right + 1].tolist() == truth[: right + 1]


def test_a_drafter_that_shares_the_noise_and_knows_the_logits_is_always_right():
    params = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.0)
    rule = SharedNoise(sampler_of(params))
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(3, VOCAB)))
    rows, host = np.zeros(1, np.int32), logits.numpy()
    drafts = [int(rule.choose(i, host[i : i + 1], rows, np.array([10 + i]))[0]) for i in range(2)]
    run = accept_runs(rule, logits, judged_of([[*drafts, NO_DRAFT]], [10]))
    assert run.count.tolist() == [3]


CHI_999 = 22.5
"""99.9 % of chi-square with 6 degrees of freedom."""
DRAWS = 1200


def chain_statistics(rule_class, case):
    """Draw a draft from q, judge it by p, and look at the token behind it too: chi-square of both, and the acceptance."""
    rng = np.random.default_rng(5)
    p = rng.normal(size=(2, VOCAB)) * 1.2
    q = rng.normal(size=(1, VOCAB)) * 1.5 if case == "far" else p[:1] + 0.4 * rng.normal(size=(1, VOCAB))
    settings = {"temperature": 1.3, **({"top_p": 0.8} if case == "top_p" else {})}
    sampler, rows = Sampler(1, VOCAB), np.zeros(1, np.int32)
    seen, accepted = np.zeros((2, VOCAB)), 0
    for seed in range(DRAWS):
        init = row_init(0, SamplingParams(seed=seed, **settings))
        sampler.set_row(init)
        rule = rule_class(sampler)
        draft = 2 if case == "certain" else int(rule.choose(0, q, rows, np.array([30]))[0])
        run = accept_runs(rule, torch.from_numpy(p), judged_of([[draft, NO_DRAFT]], [30]))
        seen[0, run.tokens[0, 0]] += 1
        if run.count[0] == 2:
            accepted += 1
            seen[1, run.tokens[0, 1]] += 1
    chi = []
    for row in range(2):
        ids, wanted = sampler.distribution(p[row], 0, 30)
        assert seen[row][np.setdiff1d(np.arange(VOCAB), ids)].sum() == 0
        expected = wanted * seen[row].sum()
        chi.append(((seen[row][ids] - expected) ** 2 / expected).sum())
    return chi, accepted / DRAWS


@pytest.mark.parametrize("case", ["near", "far", "certain", "top_p"])
def test_the_chain_rule_has_the_distribution_of_the_target(case):
    chi, accepted = chain_statistics(ChainRule, case)
    assert max(chi) < CHI_999
    assert 0 < accepted < 1
    assert case != "near" or accepted > 0.8


class Careless(ChainRule):
    """Draws anew from p, not from what q left of it."""

    def _verdict(self, index, logits, row, position, draft):
        token = super()._verdict(index, logits, row, position, draft)
        ids, p = self._sampler.distribution(logits, row, position)
        return token if token == draft else self._draw(ids, p, row, position, RESIDUAL_STREAM)


def test_a_careless_rule_would_be_noticed():
    chi, _ = chain_statistics(Careless, "far")
    assert max(chi) > CHI_999


def test_the_chain_rule_is_repeatable_and_depends_on_nothing_but_seed_and_position():
    params = SamplingParams(temperature=1.0, seed=11)
    p, q = np.random.default_rng(2).normal(size=(2, 3, VOCAB))

    def play():
        rule = ChainRule(sampler_of(params))
        drafts = [int(rule.choose(i, q[i : i + 1], np.zeros(1, np.int32), np.array([5 + i]))[0]) for i in range(2)]
        return accept_runs(rule, torch.from_numpy(p), judged_of([[*drafts, NO_DRAFT]], [5])).tokens.tolist()

    assert play() == play()


def test_a_step_in_which_nobody_chooses_is_legal():
    run = accept_runs(
        SharedNoise(sampler_of(GREEDY)),
        torch.zeros(0, VOCAB),
        Judged(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64)),
    )
    assert run.tokens.shape == (0, 3)
    assert run.count.tolist() == []


def device_of(rows):
    return DeviceSampler(rows * 4, VOCAB, ImmediateStream())


def equal(a, b):
    same = [np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "count")]
    return all(same) and (a.logprobs is None) == (b.logprobs is None)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_device_judges_and_drafts_as_the_host_does(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = data.draw(st.integers(1, 4))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_k=data.draw(st.sampled_from([0, 1, 3])),
            top_p=data.draw(st.sampled_from([1.0, 0.6])),
            seed=int(rng.integers(1 << 40)),
            # One row that only the host knows, or whose probabilities are wanted, brings the whole step to the host.
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.0, 0.5])),
            num_logprobs=data.draw(st.sampled_from([-1, -1, -1, 2])),
        )
        for _ in range(rows)
    ]
    drafts = rng.integers(0, 3, (rows, 4))
    drafts[np.arange(4) >= rng.integers(0, 4, rows)[:, None]] = NO_DRAFT
    judged = judged_of(drafts.tolist(), rng.integers(2, 50, rows).tolist())
    logits = torch.from_numpy(rng.normal(size=(int((drafts != NO_DRAFT).sum()) + rows, VOCAB)) * 2).float()
    host, device = sampler_of(*params), sampler_of(*params)
    want = accept_runs(SharedNoise(host), logits, judged)
    assert equal(accept_runs(SharedNoise(device, device_of(rows)), logits, judged), want)
    positions, first = judged.positions, logits[:rows]
    chosen = SharedNoise(device, device_of(rows)).chosen(first, judged.rows, positions)
    assert (
        chosen is None or chosen.tolist() == SharedNoise(host).choose(0, first.numpy(), judged.rows, positions).tolist()
    )
    plain = all(p.frequency_penalty == 0 and p.num_logprobs < 0 for p in params)
    assert (chosen is not None) == plain


def test_logits_that_a_device_can_judge_do_not_leave_it(monkeypatch):
    monkeypatch.setattr(acceptance, "host_of", lambda _: pytest.fail("logits went to the host"))
    rule = SharedNoise(sampler_of(GREEDY, SamplingParams(temperature=0.8, top_p=0.9)), device_of(2))
    run = accept_runs(rule, logits_of(3, 4, 5, 6).float(), judged_of([[3, 6, NO_DRAFT], [NO_DRAFT] * 3]))
    assert (run.tokens[0].tolist(), run.count.tolist()) == ([3, 4, -1], [2, 1])
    assert rule.chosen(logits_of(2, 1).float(), np.array([0, 0], np.int32), np.array([5, 6])).tolist() == [2, 1]


def test_logits_of_rows_that_are_not_judged_bring_a_step_to_the_host():
    rule = SharedNoise(sampler_of(GREEDY), device_of(1))
    judged = Judged(np.zeros(1, np.int32), np.array([1]), np.array([2]), np.array([[4, NO_DRAFT]]))
    assert accept_runs(rule, logits_of(3, 4, 5).float(), judged).tokens.tolist() == [[4, 5]]
