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
    made = torch.zeros(len(order), w2.shape[1], dtype=torch.bfloat16, device=codes.device)
    borders = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(borders)):
        x = decode_q8(codes[begin:end], scales[begin:end])
        made[order[begin:end].long()] = (x @ decode_q4(w2[expert], w2_scales[expert]).T).bfloat16()
    return made
