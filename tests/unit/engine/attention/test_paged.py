import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.paged import PagedAttention
from engine.attention.ring import RingAttention
from engine.batch import ForwardBatch

torch.set_num_threads(1)
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
WINDOW, CAPACITY = 6, 16


def dense(query, key, value, window=None):
    """Plain causal attention of one whole sequence: [n, h, d] and [n, k, d]."""
    n = len(query)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (j <= i) & (j > i - (window or n))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


class Case:
    """Sequences whose queries, keys and values are known beforehand, run through attention in steps."""

    def __init__(self, lengths, dtype=torch.float64, deterministic=False):
        generator = torch.Generator().manual_seed(sum(lengths))
        shapes = [(n, h, DIM) for n in lengths for h in (HEADS, KV_HEADS, KV_HEADS)]
        drawn = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]
        self.sequences = [drawn[3 * i : 3 * i + 3] for i in range(len(lengths))]
        self.dtype, self.deterministic = dtype, deterministic
        width = -(-max(lengths) // PAGE)
        self.tables = (torch.randperm(len(lengths) * width, generator=generator) + 1).view(len(lengths), width)
        # Stale numbers of former owners are everywhere.
        self.pages = torch.full((len(lengths) * width + 1, 2, 2, KV_HEADS, PAGE, DIM), 1e3, dtype=dtype)
        self.rings = torch.full((len(lengths), 2, 2, KV_HEADS, CAPACITY, DIM), 1e3, dtype=dtype)
        self.done = [0] * len(lengths)
        self.outputs = [[] for _ in lengths]

    def step(self, counts, kind):
        """Compute the next `counts[row]` tokens of each row."""
        rows = list(counts)
        starts = [self.done[r] for r in rows]
        positions = [range(s, s + counts[r]) for r, s in zip(rows, starts, strict=True)]
        slots = [
            int(self.tables[r, p // PAGE]) * PAGE + p % PAGE for r, ps in zip(rows, positions, strict=True) for p in ps
        ]
        q_start = np.concatenate([[0], np.cumsum([counts[r] for r in rows])]).astype(np.int32)
        batch = ForwardBatch(
            token_ids=torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.tensor([p for ps in positions for p in ps]),
            slots=torch.tensor(slots),
            page_table=self.tables[rows],
            rows=np.array(rows, np.int32),
            q_start=q_start,
            seq_start=np.array(starts, np.int32),
            sample_at=torch.zeros(0, dtype=torch.int64),
            page_tokens=PAGE,
            deterministic=self.deterministic,
        )
        query, key, value = (
            torch.cat([self.sequences[r][i][s : s + counts[r]] for r, s in zip(rows, starts, strict=True)])
            for i in range(3)
        )
        attention = PagedAttention(batch, self.pages) if kind == "paged" else RingAttention(batch, self.rings, WINDOW)
        out = attention.forward(1, query, key, value)
        for i, r in enumerate(rows):
            self.outputs[r].append(out[q_start[i] : q_start[i + 1]])
            self.done[r] += counts[r]

    def finish(self, kind):
        while rows := [r for r, (q, _, _) in enumerate(self.sequences) if self.done[r] < len(q)]:
            self.step(dict.fromkeys(rows, 1), kind)

    def check(self, kind):
        for r, (query, key, value) in enumerate(self.sequences):
            truth = dense(query, key, value, WINDOW if kind == "ring" else None)
            torch.testing.assert_close(torch.cat(self.outputs[r]), truth, atol=1e-12, rtol=1e-10)


schedules = st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 20), min_size=1), max_size=6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["paged", "ring"])
@given(lengths=st.lists(st.integers(1, 40), min_size=3, max_size=3), schedule=schedules)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_chunking_and_mix_of_rows_equals_dense_attention(kind, deterministic, lengths, schedule):
    case = Case(lengths, deterministic=deterministic)
    for counts in schedule:
        left = {r: min(n, lengths[r] - case.done[r]) for r, n in counts.items()}
        left = {r: n for r, n in left.items() if n}
        if left:
            case.step(left, kind)
    case.finish(kind)
    case.check(kind)


@pytest.mark.parametrize("kind", ["paged", "ring"])
def test_deterministic_attention_has_the_same_bits_under_every_schedule(kind):
    lengths = [37, 21, 30]
    results = []
    for schedule in ([], [{0: 37}, {1: 21}, {2: 30}], [{0: 5, 1: 20}, {2: 7}, {0: 31, 2: 23}], [{1: 2}] * 10):
        case = Case(lengths, torch.float32, deterministic=True)
        for counts in schedule:
            case.step(counts, kind)
        case.finish(kind)
        results.append([torch.cat(parts) for parts in case.outputs])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_decode_rows_of_very_different_lengths_are_grouped_and_still_right():
    lengths = [3, 200, 9, 4, 150, 1, 199, 64]
    case = Case(lengths)
    case.step({r: n - 1 for r, n in enumerate(lengths) if n > 1}, "paged")
    case.step(dict.fromkeys(range(len(lengths)), 1), "paged")
    case.check("paged")


def test_only_the_asked_layer_is_written():
    case = Case([5])
    case.step({0: 5}, "paged")
    assert (case.pages[:, 0] == 1e3).all()
    assert (case.pages[0] == 1e3).all()


def test_bfloat16_runs():
    for kind in ("paged", "ring"):
        case = Case([20, 3], torch.bfloat16)
        case.step({0: 11, 1: 2}, kind)
        case.finish(kind)
        for r, (query, key, value) in enumerate(case.sequences):
            truth = dense(query.float(), key.float(), value.float(), WINDOW if kind == "ring" else None)
            torch.testing.assert_close(torch.cat(case.outputs[r]).float(), truth, atol=0.05, rtol=0.05)
