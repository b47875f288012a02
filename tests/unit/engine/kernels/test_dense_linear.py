"""Dense products: what is chosen, right of all kinds of cuts, and the same for a row in launches of any size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.kernels.dense_linear import shape_of  # noqa: E402 - it imports Triton

ROOT = Path(__file__).resolve().parents[4]
COMMON = """
import torch
from unittest.mock import patch
from benchmarks import kernel_interpreter
kernel_interpreter.install()
from benchmarks.kernel_cases_v41 import PRODUCT, e4m3_weight
from engine.kernels import dense_linear as op
from engine.kernels.reference import dense_linear as reference
from engine.kernels.reference.formats import q8
g = torch.Generator().manual_seed(3)
shape_of = op.shape_of
def made(t, groups, n, k):
    rows, scales = q8(torch.randn(t, groups * k, generator=g).bfloat16())
    weight = e4m3_weight(g, groups, n, k)
    return rows, scales, weight, reference.dense_linear(rows, scales, *weight)
"""
CUTS = """
for groups, n, k, splits in ((1, 72, 640, 3), (2, 40, 96, 1), (1, 40, 256, 2)):
    rows, scales, weight, want = made(35, groups, n, k)
    for ahead, tile, height in ((True, 16, 64), (True, 64, 128), (False, 16, 128)):
        changed = {"splits": splits, "ahead": ahead, "tile": tile, "height": height}
        with patch.object(op, "shape_of", lambda *a, **b: shape_of(*a, **b)._replace(**changed)):
            wrong = PRODUCT(op.dense_linear(rows, scales, *weight), want)
        assert wrong is None, (groups, n, k, changed, wrong)
"""
LAID = """
with patch.object(op, "_LAID_FROM", 32), patch.object(op.chip, "sums_alike", lambda: True):
    for groups, n, k, splits in ((2, 72, 640, 3), (1, 40, 96, 1), (1, 136, 896, 7)):
        rows, scales, weight, want = made(150, groups, n, k)
        changed = lambda *a, **b: shape_of(*a, **b)._replace(splits=splits)
        assert changed(150, n, k, groups, fixed=True).widened
        with patch.object(op, "shape_of", changed):
            assert PRODUCT(op.dense_linear(rows, scales, *weight, fixed=True), want) is None, (groups, n, k)
"""
BITS = """
rows, scales, weight, want = made(300, 2, 40, 384)
with patch.object(op, "_FIXED_ROWS", 128):
    whole = op.dense_linear(rows, scales, *weight, fixed=True)
    assert PRODUCT(whole, want) is None
    # At the same columns of a tile: a CPU's product of matrices may add differently at others, matrix units do not.
    for first, t in ((0, 1), (96, 1), (32, 8), (64, 35), (0, 64), (160, 130)):
        some = op.dense_linear(rows[first : first + t], scales[first : first + t], *weight, fixed=True)
        assert torch.equal(some, whole[first : first + t]), (first, t)
"""


ONE_ROW = """
from benchmarks import kernel_compile as c
case = next(case for case in c.CASES if case.op == "dense_linear")
for launch in c.launches(case, {"t": 1, "n": 1792, "k": 1280}, c.CHIPS["sm_90"]):
    c.facts(launch, "sm_90")
"""


def _run(code: str, *, interpret: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("code", [CUTS, LAID, BITS], ids=["cuts", "laid", "bits"])
@pytest.mark.timeout(120)
def test_products_are_right_and_have_the_same_bits_in_launches_of_any_size(code):
    _run(COMMON + code, interpret=True)


@pytest.mark.timeout(120)
def test_one_row_compiles_where_the_number_of_rows_is_a_constant():
    _run(ONE_ROW, interpret=False)


@pytest.mark.parametrize("size", [(32768, 1280, 1), (5120, 8192, 1), (1792, 5120, 1), (1024, 4096, 8), (64, 32, 1)])
def test_the_shape_of_fixed_products_does_not_depend_on_rows_and_others_hold_all_few_rows(size):
    assert len({shape_of(rows, *size, fixed=True) for rows in (1, 8, 35, 64, 130, 300, 8192)}) == 1
    few = size[0] * size[2] <= 16 * 128
    for rows in (1, 8, 16, 17, 64, 100, *(() if few else (129, 256))):
        shape = shape_of(rows, *size, fixed=False)
        assert not shape.widened
        assert shape.tile >= rows
        assert shape.splits <= size[1] // 32
    assert shape_of(129 if few else 257, *size, fixed=False).widened
