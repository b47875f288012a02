"""Cases of token choice on the device; see `benchmarks.kernel_cases`."""

import torch

from benchmarks.kernel_case import Case, Inputs, exact, size_of

DTYPES = {32: torch.float32, 64: torch.float64}


def _sample_tokens(g: torch.Generator, size: dict[str, int]) -> Inputs:
    m, vocab, device = size["m"], size["vocab"], g.device
    # Few distinct values, so that ties decide.
    logits = torch.randn(m, vocab, generator=g, device=device) * size.get("spread", 2)
    logits = logits if size.get("spread") else (logits * 4).round() / 4
    logits = logits.to(DTYPES[size.get("bits", 32)])
    temperature = torch.linspace(0.3, 1.7, m, dtype=torch.float64, device=device)
    temperature[:: size.get("greedy", m + 1)] = 0
    limit = torch.iinfo(torch.int64).max
    seed = torch.randint(-limit, limit, (m,), generator=g, device=device)
    position = torch.randint(0, 1 << 20, (m,), generator=g, device=device)
    border = torch.full((m,), -torch.inf, dtype=torch.float64, device=device)
    last = torch.full((m,), vocab, device=device)
    scaled = (logits / torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)[:, None]).double()
    border[1::2], last[1::2] = scaled[1::2].amax(1) - 1.0, vocab // 2
    args = (logits, temperature, seed, position, position % 5, border, last)
    return Inputs(args, least_bytes=size_of(logits))


CASES_SAMPLING = (
    Case(
        "sample_tokens",
        _sample_tokens,
        (exact,),
        small=({"m": 4, "vocab": 1030, "greedy": 3}, {"m": 2, "vocab": 9001, "bits": 64, "spread": 3}),
        large=(
            {"m": 1, "vocab": 128256, "greedy": 1},
            {"m": 64, "vocab": 128256, "greedy": 1},
            {"m": 256, "vocab": 128256, "greedy": 1},
            {"m": 64, "vocab": 128256, "spread": 4},
            {"m": 256, "vocab": 128256, "spread": 4},
            {"m": 256, "vocab": 128256, "greedy": 3},
            {"m": 8, "vocab": 320, "bits": 64, "greedy": 2},
        ),
        compiled=({"m": 2, "vocab": 32000, "spread": 4},),
    ),
)
