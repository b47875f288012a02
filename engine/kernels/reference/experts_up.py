"""Specification of `engine.kernels.experts_up`."""

from itertools import pairwise

import torch
from torch.nn import functional

from engine.kernels.reference.formats import decode_q8, expert_product, q8
from engine.kernels.shards import Shards


def experts_up(
    codes: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w13: Shards,
    route_weights: torch.Tensor,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inner activations of sorted pairs, quantized; see the kernel for shapes."""
    top_k = route_weights.shape[1]
    words, word_scales = torch.cat(w13.codes), torch.cat(w13.scales)
    inner = words.shape[1] * 32
    made = torch.zeros(len(order), inner, dtype=torch.uint8, device=codes.device)
    made_scales = torch.zeros(len(order), inner // 32, dtype=torch.uint8, device=codes.device)
    borders = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(borders)):
        if begin == end:
            continue
        pairs = order[begin:end].long()
        x = decode_q8(codes[pairs // top_k], scales[pairs // top_k])
        gate, up = expert_product(x, words[expert], word_scales[expert]).chunk(2, 1)
        weight = route_weights.flatten()[pairs, None]
        inside = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
        made[begin:end], made_scales[begin:end] = q8(inside.bfloat16())
    return made, made_scales
