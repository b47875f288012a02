"""Specification of `engine.kernels.index_scores`."""

import torch

from engine.kernels.reference.formats import decode_q4


def index_scores(
    heads: torch.Tensor,
    weights: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Score visible entries; see the kernel for shapes."""
    by_sequence = (len(pages), len(heads) // len(pages))
    keys = decode_q4(key_codes[pages].flatten(1, 2), key_scales[pages].flatten(1, 2))
    products = torch.einsum("brhw,bnw->brhn", heads.float().unflatten(0, by_sequence), keys).relu_()
    made = (products * weights.unflatten(0, by_sequence)[..., None]).sum(2).flatten(0, 1)
    count = keys.shape[1]
    seen = torch.arange(count, device=heads.device) < visible[:, None]
    scores[:, :count] = torch.where(seen, made.to(scores.dtype), scores[:, :count])
