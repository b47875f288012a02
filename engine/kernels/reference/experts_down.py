"""Specification of `engine.kernels.experts_down`."""

from itertools import pairwise

import torch

from engine.kernels.reference.formats import decode_q8, expert_product
from engine.kernels.shards import Shards


def experts_down(
    codes: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w2: Shards,
) -> torch.Tensor:
    """Return every pair's contribution bfloat16 [t k, d]; see the kernel."""
    words, word_scales = torch.cat(w2.codes), torch.cat(w2.scales)
    rows = decode_q8(codes, scales)
    made = rows.new_zeros(len(order), words.shape[1] * 64)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        made[order[begin:end].long()] = expert_product(rows[begin:end], words[expert], word_scales[expert])
    return made.bfloat16()
