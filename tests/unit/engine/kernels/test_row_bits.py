"""A row's bits depend on the row alone, however many rows share a launch: few rows are cut finer than many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]
COMMON = """
import torch
from unittest.mock import patch
from benchmarks import kernel_interpreter
kernel_interpreter.install()
g = torch.Generator().manual_seed(3)
"""
COEFFICIENTS = """
from engine.kernels import stream_coefficients as op
from engine.kernels.reference.formats import thirds
x = torch.randn(3, 4, 1024, generator=g).bfloat16()
fn = thirds(torch.randn(24, 4096, generator=g) / 64)
scale, base = torch.rand(3, generator=g), torch.randn(24, generator=g)
made, shape_of = [], op.shape_of
# Eight groups of four steps, as programs of one step or of four.
with patch.object(op, "_GROUPS", 8):
    for each in (1, 4):
        with patch.object(op, "shape_of", lambda *_: shape_of(*_)._replace(each=each)):
            made.append(op.stream_coefficients(x, fn, scale, base, 1e-20, 1e-6))
assert all(torch.equal(a, b) for some in made[1:] for a, b in zip(made[0], some, strict=True))
"""
LINEAR = """
from engine.kernels import plain_linear as op
x, w = torch.randn(70, 1024, generator=g).bfloat16(), torch.randn(48, 1024, generator=g).bfloat16()
with patch.object(op, "_PROGRAMS", 4):
    few, many = (op.shape_of(rows, 48, 1024, fixed=True) for rows in (1, 70))
    assert (few.parts, few.each, many.each) == (2, 1, 2), (few, many)
    whole = op.plain_linear(x, w, fixed=True)
    # At the same columns of a tile: a CPU's product of matrices may add differently at others, matrix units do not.
    assert all(torch.equal(op.plain_linear(x[i : i + n], w, fixed=True), whole[i : i + n]) for i, n in ((0, 1), (32, 9)))
"""
SCAN = """
from benchmarks.kernel_cases import _index_scores
from engine.kernels import index_scores as op
for each in (2, 4, 6, 8, 9):
    inputs = _index_scores(g, {"b": 4, "rows": each, "n": 300, "m": 2, "uneven": 1})
    heads, weights, codes, scales, pages, visible, scores = inputs.args
    scales.fill_(127)  # Products are exact on a CPU, too.
    starts, alone = inputs.keywords["starts"], scores.clone()
    op.index_scores(*inputs.args, **inputs.keywords)
    end, owner = int(starts[-1]), torch.arange(4).repeat_interleave(starts.diff())
    op.index_scores(heads[:end], weights[:end], codes, scales, pages[owner], visible[:end], alone)
    assert end < len(scores) and scores[:end].isfinite().any(1).all(), (each, end)
    assert torch.equal(scores.nan_to_num(7e9), alone.nan_to_num(7e9)), each
"""


@pytest.mark.parametrize(
    "code", [COEFFICIENTS, LINEAR, SCAN], ids=["stream_coefficients", "plain_linear", "index_scores"]
)
@pytest.mark.timeout(120)
def test_rows_have_the_same_bits_in_launches_of_any_size(code):
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
