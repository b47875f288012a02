"""Selection from wide rows: by groups it finds what it finds from all columns, whatever the scores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.kernels.select_top import shape_of  # noqa: E402 - it imports Triton

ROOT = Path(__file__).resolve().parents[4]
CODE = """
import torch
from unittest.mock import patch
from benchmarks import kernel_interpreter
kernel_interpreter.install()
from engine.kernels import select_top as op
from engine.kernels.reference.select_top import select_top as reference
g = torch.Generator().manual_seed(5)
n = 3000
rising = torch.arange(n).float()
rows = {
    "random": torch.randn(n, generator=g),
    "equal": torch.full((n,), 2.5),
    "two values": torch.randint(0, 2, (n,), generator=g).float(),
    "rising": rising,
    "falling": -rising,
    "all in few groups": torch.where(rising < 40, 1e30 + rising, -rising),
    "few finite": torch.where(rising % 500 == 7, rising, -torch.inf),
    "as many as are wanted": torch.where(rising % 97 == 3, 1.0, torch.nan),
    "nothing": torch.full((n,), torch.nan),
    "smallest and largest": torch.where(rising % 2 == 0, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max),
    "zeros of both signs": torch.where(rising % 3 == 0, -0.0, 0.0),
    "neighbours": torch.tensor([2.0, 2.0 + 2**-22])[torch.randint(0, 2, (n,), generator=g)],
}
scores = torch.stack(list(rows.values()))
with patch.object(op, "_CHUNK", 1024):
    for k in (31, 16):
        assert op.shape_of(k, 1, n).group == 16
        for seen in (n, 1700, 33, 0):
            visible = torch.full((len(scores),), seen, dtype=torch.int32)
            made, want = op.select_top(scores, visible, k, 1), reference(scores, visible, k, 1)
            for name, a, b in zip(rows, made, want, strict=True):
                assert torch.equal(a, b), (name, k, seen, a, b)
"""


def test_wide_rows_are_searched_by_groups_and_short_ones_are_not():
    assert shape_of(512, 1, 65_536).group == 16
    assert shape_of(512, 1, 8192).group == 1
    assert shape_of(2048, 1, 65_536).group == 1, "the groups of so many would not fit into a program"
    assert shape_of(512, 8, 65_536).group == 1


@pytest.mark.timeout(120)
def test_groups_find_what_all_columns_hold():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
