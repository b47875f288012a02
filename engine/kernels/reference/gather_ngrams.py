"""Specification of `engine.kernels.gather_ngrams`."""

import torch


def gather_ngrams(
    ids: torch.Tensor, owner: torch.Tensor, q_start: torch.Tensor, history: torch.Tensor, image: int
) -> torch.Tensor:
    """Return every token, then older ones of its sequence; see the kernel for the rules."""
    length = history.shape[1] + 1
    number, back = (torch.arange(count, device=ids.device) for count in (len(ids), length))
    inside = (number - q_start.long()[owner])[:, None] - back
    own = ids[(number[:, None] - back).clamp(min=0)]
    before = history[owner[:, None], (inside + length - 1).clamp(0, length - 2)]
    found = torch.where(inside >= 0, own, before)
    return found.masked_fill(found == image, -1)
