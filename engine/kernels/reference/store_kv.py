"""Specification of `engine.kernels.store_kv`."""

import torch

from engine.layers.rotary import rotate


def store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values; see the kernel for shapes."""
    kv_heads, size, width = pages.shape[2:]
    heads = qkv.unflatten(1, (-1, width))
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    turn = cos[positions][:, None], sin[positions][:, None]
    kept = (slots >= 0).nonzero()[:, 0]
    page, offset = slots[kept] // size, slots[kept] % size
    pages[page, 0, :, offset] = rotate(key, *turn)[kept]
    pages[page, 1, :, offset] = value[kept]
    return rotate(query, *turn)
