"""Specification of `engine.kernels.store_entries`."""

import torch

from engine.kernels.reference.formats import normalised, q4, q4kv, turned


def store_entries(
    pending: torch.Tensor,
    index: torch.Tensor,
    norm: torch.Tensor,
    wk: torch.Tensor,
    key_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    page: torch.Tensor,
    at: torch.Tensor,
    entries: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    eps: float,
) -> None:
    """Pool, normalise, pack and store entries and their index keys; see the kernel for shapes."""
    values = pending[index]  # [n, m, 1 or 2, D]
    pooled = values[:, 0, 0] if values.shape[2] == 1 else (values[:, :, 1].softmax(1) * values[:, :, 0]).sum(1)
    latents = normalised(pooled.bfloat16(), norm, eps)
    kept = page >= 0
    page, at = page[kept], at[kept]
    entries[page, at] = torch.cat(q4kv(turned(latents, cos, sin)), 1)[kept]
    projected = (latents.float() @ wk.float().T).bfloat16()
    codes, scales = q4(turned(normalised(projected, key_norm, eps), cos, sin))
    key_codes[page, at] = codes[kept]
    key_scales[page, at] = scales[kept]
