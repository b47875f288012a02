"""Specification of `engine.kernels.stream_coefficients`."""

import torch


def stream_coefficients(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pre, post, comb of one sublayer; see the kernel for shapes. Twenty rounds, the first without rows."""
    flat = streams.float().flatten(1)
    hc = streams.shape[1]
    weight = fn[2].float() + fn[1].float() + fn[0].float()
    z = (flat @ weight.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    z = z * scale.repeat_interleave(torch.tensor([hc, hc, hc * hc], device=scale.device)) + base
    pre = torch.sigmoid(z[:, :hc]) + eps
    post = 2 * torch.sigmoid(z[:, hc : 2 * hc])
    comb = z[:, 2 * hc :].view(-1, hc, hc).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb
