"""Specification of `engine.kernels.lay_tokens`."""

import torch

_NEVER = 1 << 40


def lay_tokens(
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    floors: torch.Tensor | None,
    image: int,
    ratios: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return owner, record, floor, kept, kind and visible entries of every token; see the kernel for the rules."""
    number = torch.arange(len(ids), device=ids.device)
    is_real = slots >= 0
    # Of sequences without tokens, none is the last one that begins at or before a token.
    owner = torch.searchsorted(q_start[1:].long(), number, right=True).clamp(max=len(rows) - 1)
    owner = owner.masked_fill(~is_real, 0)
    record = rows.long()[owner].masked_fill(~is_real, 0)
    lowest = torch.zeros_like(owner) if floors is None else floors[owner]
    lowest = lowest.masked_fill(~is_real, _NEVER)
    kinds = (ids == image).int().masked_fill(~is_real, -1)
    seen = [(positions + 1).div(m, rounding_mode="floor").masked_fill(~is_real, 0).int() for m in ratios]
    visible = torch.stack(seen) if seen else kinds.new_empty(0, len(ids))
    return owner, record, lowest, positions >= lowest, kinds, visible
