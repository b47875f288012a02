"""Dense products whose powers of two are in their factors: right, and the same for a row in launches of any size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]
CODE = """
import torch
from benchmarks import kernel_interpreter
kernel_interpreter.install()
from benchmarks.kernel_cases_v41 import PRODUCT, e4m3_weight
from engine.kernels import dense_linear as op
from engine.kernels.reference import dense_linear as reference
from engine.kernels.reference.formats import q8
from unittest.mock import patch
g = torch.Generator().manual_seed(3)
shape_of = op.shape_of
for groups, n, k, changed in (
    (1, 72, 640, {"splits": 3}), (2, 40, 96, {}), (1, 64, 512, {"step": 256}), (1, 40, 256, {"splits": 2, "block": 256}),
):
    rows, scales = q8(torch.randn(35, groups * k, generator=g).bfloat16())
    weight = e4m3_weight(g, groups, n, k)
    want = reference.dense_linear(rows, scales, *weight)
    for ahead, parts, joined in ((True, 2, False), (True, 1, True), (False, 1, False)):
        usual = {"splits": 1, "folded": True, "ahead": ahead, "parts": parts, "joined": joined}
        shape = lambda *a, **b: shape_of(*a, **b)._replace(**usual | changed)
        with patch.object(op, "shape_of", shape):
            got = op.dense_linear(rows, scales, *weight, fixed=True)
            some = op.dense_linear(rows[30:34], scales[30:34], *weight, fixed=True)
        wrong = PRODUCT(got, want)
        assert wrong is None and torch.equal(got[30:34], some), (groups, n, k, changed, ahead, wrong)
"""


@pytest.mark.timeout(120)
def test_folded_products_are_right_and_have_the_same_bits_in_launches_of_any_size():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
