"""Specification of `engine.kernels.select_top`."""

import torch


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Return the best k columns (or blocks of columns) of every row, ascending; see the kernel for the rules."""
    columns = scores.shape[1]
    seen = torch.arange(columns, device=scores.device) < visible[:, None]
    best = scores.masked_fill(~seen, -torch.inf)
    usable = best.isfinite()
    if block > 1:
        padding = (0, -columns % block)
        best = torch.nn.functional.pad(best.masked_fill(~usable, -torch.inf), padding, value=-torch.inf)
        best = best.unflatten(1, (-1, block)).amax(2)
        newest = torch.arange(best.shape[1], device=scores.device) == (visible[:, None] - 1) // block
        best = best.masked_fill(newest & (visible[:, None] > 0), torch.finfo(torch.float32).max)
        usable = best.isfinite()
    count = best.shape[1]
    order = best.masked_fill(~usable, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = order.masked_fill(~usable.gather(1, order), count).sort(dim=1).values
    chosen = torch.nn.functional.pad(chosen, (0, max(0, k - chosen.shape[1])), value=count)
    return chosen.masked_fill(chosen == count, -1).int()
