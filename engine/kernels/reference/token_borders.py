"""Specification of `engine.kernels.token_borders`: rows sorted whole."""

import torch


def token_borders(
    logits: torch.Tensor,
    at: torch.Tensor,
    temperature: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (border, last) of rows `at`; see the kernel for shapes. Also serves float64 logits."""
    scaled = logits[at] / temperature.to(logits.dtype)[:, None]
    vocab = scaled.shape[1]
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    wide = values.double()
    gaps = wide - wide[:, :1]
    count = ((gaps >= log_min_p[:, None]) & (wide > -torch.inf)).sum(1)
    count = torch.where(top_k > 0, torch.minimum(count, top_k), count)
    rank = torch.arange(vocab, device=scaled.device)
    mass = gaps.exp().masked_fill_(rank >= count[:, None], 0).cumsum(1)
    enough = torch.searchsorted(mass, (top_p * mass[:, -1])[:, None])[:, 0] + 1
    count = torch.where(top_p < 1, torch.minimum(count, enough), count)
    end = (count - 1).clamp(min=0)[:, None]
    border = wide.gather(1, end)
    whole = (count == (wide >= border).sum(1)) | (border[:, 0] == -torch.inf)
    return border[:, 0], torch.where(whole, vocab, ids.gather(1, end)[:, 0])
