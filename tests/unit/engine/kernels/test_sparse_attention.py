"""What CI cannot run of sparse attention: its other shapes in the interpreter, and the bits that its PTX places."""

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.kernels import sparse_attention_keys  # noqa: E402 - it imports Triton

ROOT = Path(__file__).resolve().parents[4]
WORD = (1 << 32) - 1
HALVES = (2.0**-126, -(2.0**-126))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHAPES = """
from unittest.mock import patch
from benchmarks import kernel_interpreter
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check
from engine.kernels import sparse_attention as module

kernel_interpreter.install()
case = next(case for case in CASES if case.op == "sparse_attention")
original = module.shape_of
for size, changed in (
    ({"b": 1, "rows": 2, "n": 300, "k": 256, "h": 16, "splits": 3}, {"tile": 128}),
    ({"b": 1, "rows": 2, "n": 300, "k": 256, "h": 16, "splits": 1}, {"tile": 128, "heads": 32}),
    ({"b": 2, "rows": 1, "n": 300, "k": 192, "h": 16, "splits": 2}, {"heads": 32}),
    ({"b": 2, "rows": 1, "n": 100, "k": 128, "h": 16, "splits": 3}, {"merge_heads": 4}),
):
    with patch.object(module, "shape_of", lambda *a, **k: original(*a, **k)._replace(**changed)):
        wrong = check(case, size, "cpu")
    assert wrong is None, (size, changed, wrong)
"""

QUANTIZED = """
import torch
from benchmarks import kernel_interpreter
from benchmarks.kernel_cases import CASES
from engine.kernels.quantize_rows import quantize_rows
from engine.kernels.sparse_attention import sparse_attention

kernel_interpreter.install()
case = next(case for case in CASES if case.op == "sparse_attention")
for splits in (1, 3):
    size = {"b": 2, "rows": 1, "n": 100, "k": 128, "h": 16, "splits": splits}
    args = case.make(torch.Generator().manual_seed(3), size).args
    codes, scales = sparse_attention(*args, quantized=True)
    wanted = quantize_rows(sparse_attention(*args).flatten(1))
    assert codes.shape == (2, 16 * 512) and scales.shape == (2, 16 * 16)
    assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1]), splits
"""


def interpreted(*arguments: str) -> None:
    """Run Python in a process of its own: the interpreter is chosen when kernels are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_quantized_outputs_are_the_codes_of_the_plain_ones():
    interpreted("-c", QUANTIZED)


@pytest.mark.timeout(120)
def test_other_shapes_equal_the_reference_in_the_interpreter():
    interpreted("-c", SHAPES)


@pytest.mark.timeout(120)
def test_keys_are_in_order_where_ptx_unpacks_them():
    interpreted("-m", "tests.fakes.keys_without_ptx")


def bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def permuted(a: int, b: int, selector: int) -> int:
    """Return what `prmt` does, without its replication of signs."""
    held = [(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)]
    return sum(held[(selector >> (4 * i)) & 7] << (8 * i) for i in range(4))


RUN = {
    "prmt.b32": permuted,
    "shl.b32": lambda a, n: (a << n) & WORD,
    "shf.l.wrap.b32": lambda a, b, n: ((b << n) | (a >> (32 - n))) & WORD,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mul.rn.bf16x2": lambda a, _: a,
}


def placed(function: object, inputs: dict[str, int]) -> dict[str, int]:
    """Return the registers behind a body's PTX, of which products return the bits that they would scale."""
    body = re.search(r'"""\{(.*?)\}"""', function.src, re.DOTALL)
    assert body is not None
    held = dict(inputs)
    for line in body[1].replace("\n", " ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in RUN:
            target, *sources = (word.strip() for word in rest.split(","))
            held[target] = RUN[name](*(held[s] if s in held else int(s, 0) for s in sources))
    return held


@pytest.mark.parametrize("seed", range(20))
def test_nibbles_are_placed_in_order_as_2_to_the_minus_126_of_their_values(seed):
    word = random.Random(seed).getrandbits(32)
    held = placed(sparse_attention_keys._nibbles, {"$4": word, "$5": 0})  # noqa: SLF001
    for place in range(8):
        code = (word >> (4 * place)) & 15
        value = E2M1[code & 7] * HALVES[code >> 3]
        assert bfloat16((held[f"${place // 2}"] >> (16 * (place % 2))) & 0xFFFF) == value


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_placed_in_order_as_2_to_the_minus_120_of_their_values(seed):
    word = random.Random(seed).getrandbits(32)
    held = placed(sparse_attention_keys._bytes, {"$2": word, "$3": 0})  # noqa: SLF001
    for place in range(4):
        code = (word >> (8 * place)) & 0xFF
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        value = (-size if code & 0x80 else size) * 2.0**-120
        assert bfloat16((held[f"${place // 2}"] >> (16 * (place % 2))) & 0xFFFF) == value
