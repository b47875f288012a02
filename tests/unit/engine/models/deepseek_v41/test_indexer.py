import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.indexer import (
    Indexer,
    IndexQueries,
    block_mask,
    candidate_blocks,
    entries_of_blocks,
    index_scores,
    select_top,
)
from engine.models.deepseek_v41.rope import RopeTables
from tests.fakes.v41_reference import tiny, tiny_weights

torch.set_num_threads(1)


def all_allowed(scores):
    return torch.ones(scores.shape, dtype=torch.bool)


def test_ties_go_to_the_lowest_entry():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    assert select_top(scores, all_allowed(scores), 3).tolist() == [[0, 1, 3], [0, 1, 2]]


def test_only_allowed_finite_scores_are_selected_and_the_rest_is_minus_one():
    scores = torch.tensor([[5.0, -torch.inf, 1.0, 9.0, torch.inf]])
    allowed = torch.tensor([[True, True, True, False, True]])
    assert select_top(scores, allowed, 4).tolist() == [[0, 2, -1, -1]]
    assert select_top(scores, torch.zeros_like(allowed), 2).tolist() == [[-1, -1]]


def test_fewer_entries_than_k_give_as_many_columns():
    scores = torch.tensor([[3.0, 1.0]])
    assert select_top(scores, all_allowed(scores), 8).tolist() == [[0, 1]]
    assert select_top(scores[:, :0], all_allowed(scores)[:, :0], 8).shape == (1, 0)


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30),
    st.integers(1, 12),
)
def test_a_selection_is_that_of_a_sorted_list(columns, k):
    scores = torch.tensor([[float(score) for score, _ in columns]])
    allowed = torch.tensor([[ok for _, ok in columns]], dtype=torch.bool)
    ranked = sorted((-score, i) for i, (score, ok) in enumerate(columns) if ok)
    wanted = sorted(i for _, i in ranked[:k])
    got = select_top(scores.view(1, -1), allowed.view(1, -1), k)[0].tolist()
    assert got == wanted + [-1] * (min(k, len(columns)) - len(wanted))


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 6), st.data())
def test_candidate_blocks_are_the_best_ones_and_the_newest(values, size, top, data):
    visible = data.draw(st.integers(1, len(values)))
    scores = torch.tensor([[float(v) for v in values]])
    newest = (visible - 1) // size
    best = {}
    for i in range(visible):
        best[i // size] = max(best.get(i // size, -99), values[i])
    ranked = sorted(best, key=lambda b: (b != newest, -best[b], b))
    got = candidate_blocks(scores, torch.tensor([visible]), size, top)[0].tolist()
    assert [b for b in got if b >= 0] == sorted(ranked[:top])
    mask = block_mask(torch.tensor([got]), size, len(values))[0].tolist()
    assert mask == [i // size in ranked[:top] for i in range(len(values))]


def test_a_row_that_sees_no_entry_has_no_candidate():
    blocks = candidate_blocks(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), 2, 4)
    assert blocks.tolist() == [[-1]]
    assert entries_of_blocks(blocks, 2).tolist() == [[-1, -1]]


def test_scores_are_weighted_sums_of_rectified_products():
    generator = torch.Generator().manual_seed(3)
    heads = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    keys = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    wanted = torch.stack([
        torch.stack([sum(w * torch.relu(q @ key) for w, q in zip(ws, qs, strict=True)) for key in keys])
        for ws, qs in zip(weights, heads, strict=True)
    ])  # fmt: skip
    queries = IndexQueries(heads, weights)
    assert (index_scores(queries, keys) - wanted).abs().max() < 1e-12
    assert (index_scores(queries, keys.expand(3, 5, 8)) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_scores_are_rounded_once_when_a_score_type_is_set(dtype):
    queries = IndexQueries(torch.ones(1, 1, 2), torch.tensor([[1.0]]))
    keys = torch.tensor([[1.001, 0.0], [1.0, 0.0]])
    assert index_scores(queries, keys, dtype).tolist() == [[1.0, 1.0]]
    assert index_scores(queries, keys)[0, 0] > 1


def test_index_queries_have_the_formats_values_only_if_caches_are_quantized():
    config, weights = tiny(), tiny_weights().layers[2].attn.indexer
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    latent, turn = x[:, :64], RopeTables(config, 8, torch.float64).at("compress", torch.arange(6))
    on, off = (
        Indexer(weights, config, arithmetic_of(config, activations=False, caches=caches)).queries(x, latent, turn)
        for caches in (True, False)
    )
    assert torch.equal(on.weights, off.weights)
    assert 0 < (on.heads - off.heads).abs().max() < 0.25 * off.heads.abs().max()
    assert arithmetic_of(config).index_row(on.heads).equal(on.heads)
