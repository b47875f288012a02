"""Specification of `engine.kernels.block_scores`."""

import torch

from engine.kernels.reference.formats import decode_q4


def block_scores(
    heads: torch.Tensor,
    weights: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Score the entries of every row's blocks; see the kernel for shapes."""
    per_page = key_codes.shape[1]
    entries = (blocks.long()[:, :, None] * block + torch.arange(block, device=blocks.device)).flatten(1)
    valid = (entries >= 0) & (entries < visible[:, None])
    entries = entries.masked_fill(~valid, 0)
    page, at = pages.gather(1, entries // per_page).long(), entries % per_page
    keys = decode_q4(key_codes[page, at], key_scales[page, at])
    products = torch.einsum("thw,tnw->thn", heads.float(), keys).relu_()
    return (products * weights[:, :, None]).sum(1).masked_fill(~valid, -torch.inf)
