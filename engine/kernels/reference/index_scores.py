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
    each = len(heads) // len(pages)
    for i, table in enumerate(pages):
        keys = decode_q4(key_codes[table].flatten(0, 1), key_scales[table].flatten(0, 1))
        for row in range(i * each, (i + 1) * each):
            seen = int(visible[row])
            products = (heads[row].float() @ keys[:seen].T).relu_()
            scores[row, :seen] = (products * weights[row, :, None]).sum(0)
