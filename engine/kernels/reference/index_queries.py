"""Specification of `engine.kernels.index_queries`."""

import torch

from engine.kernels.reference.formats import decode_q4, q4, turned


def index_queries(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return index queries turned and rounded to the index format; see the kernel for shapes."""
    return decode_q4(*q4(turned(x, cos, sin))).bfloat16()
