"""Specification of `engine.kernels.experts_down`."""

from itertools import pairwise

import torch

from engine.kernels.reference.formats import decode_q4, decode_q8, untiled


def experts_down(
    codes: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
) -> torch.Tensor:
    """Return every pair's contribution bfloat16 [t k, d]; see the kernel."""
    w2, w2_scales = untiled(w2, w2_scales)
    rows = decode_q8(codes, scales)
    made = rows.new_zeros(len(order), w2.shape[1])
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        made[order[begin:end].long()] = rows[begin:end] @ decode_q4(w2[expert], w2_scales[expert]).T
    return made.bfloat16()
