"""Runs sparse attention in Triton's interpreter as NVIDIA's chips have it: bodies of PTX stand in as plain Triton."""

from unittest.mock import patch

import triton
import triton.language as tl

from benchmarks import kernel_interpreter
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check
from engine.kernels import chip, sparse_attention, sparse_attention_keys
from engine.kernels.device import e2m1_value, e4m3_value


@triton.jit
def _scaled(values, scales):
    """Return int32 bits of bfloat16 products with the bfloat16 that `scales` int32 hold twice."""
    product = values * (scales & -65536).to(tl.float32, bitcast=True)
    return product.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _two_nibbles(words, scales, k: tl.constexpr):
    low = e2m1_value((words >> (8 * k)) & 15) * 1.1754943508222875e-38
    high = e2m1_value((words >> (8 * k + 4)) & 15) * 1.1754943508222875e-38
    return _scaled(low, scales) | (_scaled(high, scales) << 16)


@triton.jit
def _nibbles(words, scales):
    return (
        _two_nibbles(words, scales, 0), _two_nibbles(words, scales, 1),
        _two_nibbles(words, scales, 2), _two_nibbles(words, scales, 3),
    )  # fmt: skip


@triton.jit
def _two_bytes(words, scales, k: tl.constexpr):
    low = e4m3_value(((words >> (16 * k)) & 0xFF).to(tl.uint8)) * 7.52316384526264e-37
    high = e4m3_value(((words >> (16 * k + 8)) & 0xFF).to(tl.uint8)) * 7.52316384526264e-37
    return _scaled(low, scales) | (_scaled(high, scales) << 16)


@triton.jit
def _bytes(words, scales):
    return _two_bytes(words, scales, 0), _two_bytes(words, scales, 1)


def main() -> None:
    """Check every small size, and tiles of 128 keys."""
    kernel_interpreter.install()
    case = next(case for case in CASES if case.op == "sparse_attention")
    wide = {"b": 1, "rows": 2, "n": 300, "k": 256, "h": 64, "splits": 1}
    with (
        patch.object(sparse_attention_keys, "_nibbles", _nibbles),
        patch.object(sparse_attention_keys, "_bytes", _bytes),
        patch.object(chip, "speaks_ptx", lambda: True),
        patch.object(sparse_attention, "overlaps", lambda: False),
    ):
        assert sparse_attention.shape_of(64, 128, 256, 1, upright=False).tile == 128
        for size in (*case.small, wide):
            wrong = check(case, size, "cpu")
            assert wrong is None, (size, wrong)


if __name__ == "__main__":
    main()
