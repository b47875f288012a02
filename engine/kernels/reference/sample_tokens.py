"""Specification of `engine.kernels.sample_tokens`: `engine.sampling` for many rows, in torch."""

import torch

from engine.sampling import GREEDY_BELOW

_LOW = 0xFFFFFFFF


def _philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """As `engine.philox.philox4x32`, on int64 tensors that hold 32-bit words; products wrap as unsigned ones do."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (p0 >> 32) & _LOW, (p1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _LOW, high0 ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _gumbel(vocab: int, seed: torch.Tensor, position: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return float64 [m, vocab]: the noise of every token."""
    group = torch.arange(-(-vocab // 4), device=seed.device)[None]
    zero = torch.zeros_like(group) + torch.zeros_like(seed)[:, None]
    counter = (position[:, None] + zero, sample[:, None] + zero, group + zero, zero)
    lanes = _philox(counter, ((seed & _LOW)[:, None], ((seed >> 32) & _LOW)[:, None]))
    words = torch.stack(lanes, 2).flatten(1)[:, :vocab]
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    border: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Choose one token a row; see the kernel for shapes."""
    vocab = logits.shape[1]
    ids = torch.arange(vocab, device=logits.device)[None]
    greedy = (temperature < GREEDY_BELOW)[:, None]
    scaled = (logits / torch.where(greedy, 1.0, temperature[:, None]).to(logits.dtype)).double()
    allowed = (scaled > border[:, None]) | ((scaled == border[:, None]) & (ids <= last[:, None]))
    noisy = scaled + _gumbel(vocab, seed, position, sample)
    values = torch.where(greedy, scaled, noisy.masked_fill(~allowed, -torch.inf))
    best = values.amax(1, keepdim=True)
    return torch.where(values == best, ids, vocab).amin(1)
