# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""DeepSelect: the values of the best k of a row. Which of equal scores it takes it does not say, so ties are settled here."""

import deep_select
import torch
from torch.nn import functional

from engine.kernels.reference.select_top import select_top as by_blocks


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Return what `engine.kernels.select_top` does; blocks are the reference's, because their newest is pinned."""
    if block > 1:
        return by_blocks(scores, visible, k, block)
    columns = torch.arange(scores.shape[1], device=scores.device)
    usable = scores.isfinite() & (columns < visible[:, None])
    # It aborts on NaN and has no use for infinities. Rows must be a multiple of so many bytes apart.
    least = torch.finfo(torch.float32).min
    apart = deep_select.get_stride_requirement()[0] // 4
    clean = scores.masked_fill(~usable, least)
    padded = functional.pad(clean, (0, max(k - clean.shape[1], 0)), value=least)
    padded = functional.pad(padded, (0, -padded.shape[1] % apart), value=least)
    values, _ = deep_select.topk(padded, k, indices_type=torch.int32)
    border = values.amin(1, keepdim=True)
    above, equal = usable & (clean > border), usable & (clean == border)
    chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    found = torch.full((len(scores), k + 1), -1, dtype=torch.int32, device=scores.device)
    place = torch.where(chosen, chosen.cumsum(1) - 1, k)
    return found.scatter_(1, place, columns.int().expand_as(place))[:, :k]
