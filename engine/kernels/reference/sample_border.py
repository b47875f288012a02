"""Specification of `engine.kernels.sample_border`."""

import torch


def sample_border(
    scaled: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    by_k: bool,
    by_p: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort, then count and sum; see the kernel for shapes."""
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    wide = values.double()
    gaps = wide - wide[:, :1]
    count = (gaps >= log_min_p[:, None]).sum(1)
    if by_k:
        count = torch.where(top_k > 0, torch.minimum(count, top_k), count)
    if by_p:
        rank = torch.arange(scaled.shape[1], device=scaled.device)
        mass = gaps.exp().masked_fill_(rank >= count[:, None], 0).cumsum(1)
        enough = torch.searchsorted(mass, (top_p * mass[:, -1])[:, None])[:, 0] + 1
        count = torch.where(top_p < 1, torch.minimum(count, enough), count)
    end = (count - 1).clamp(min=0)[:, None]
    return wide.gather(1, end)[:, 0], ids.gather(1, end)[:, 0]
