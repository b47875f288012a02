"""Specification of `engine.kernels.token_logprobs`."""

import torch


def token_logprobs(
    logits: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probabilities, best) of rows `at`; see the kernel for shapes. Also serves float64 logits."""
    raw = logits[at].double()
    total = raw.logsumexp(1, keepdim=True)
    best = raw.sort(dim=1, descending=True, stable=True).indices[:, :count]
    found = torch.cat((tokens[:, None], best), 1)
    return (raw.gather(1, found) - total).float(), best
