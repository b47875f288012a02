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
    starts: torch.Tensor | None = None,
    each: int = 0,  # noqa: ARG001 - for the kernel's programs
) -> None:
    """Score visible entries; see the kernel for shapes."""
    if starts is not None:
        row = torch.arange(len(heads), dtype=starts.dtype, device=heads.device)
        owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(pages) - 1)
        pages, visible = pages[owner], visible.masked_fill(row >= starts[-1], 0)
    by_sequence = (len(pages), len(heads) // len(pages))
    keys = decode_q4(key_codes[pages].flatten(1, 2), key_scales[pages].flatten(1, 2))
    products = torch.einsum("brhw,bnw->brhn", heads.float().unflatten(0, by_sequence), keys).relu_()
    made = (products * weights.unflatten(0, by_sequence)[..., None]).sum(2).flatten(0, 1)
    count = keys.shape[1]
    seen = torch.arange(count, device=heads.device) < visible[:, None]
    scores[:, :count] = torch.where(seen, made.to(scores.dtype), scores[:, :count])
