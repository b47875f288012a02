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
    if size.get("cold"):
        # Equal logits are so large that float32 hardly tells their noise.
        temperature, logits = temperature * 1e-4, logits.clamp(max=1) * 1000
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


def _token_borders(g: torch.Generator, size: dict[str, int]) -> Inputs:
    r, vocab, device = size["r"], size["v"], g.device
    logits = torch.randn(r, vocab, generator=g, device=device)
    # Peaked as a trained model's: few ids have the mass. Flat: all have some.
    logits = (
        logits * 0.5
        if size.get("flat")
        else logits * 2 + 24 * torch.rand(logits.shape, generator=g, device=device).pow(512)
    )
    if size.get("ties"):
        logits = logits.bfloat16().float()
    if size.get("holes"):
        logits = logits.masked_fill(torch.rand(logits.shape, generator=g, device=device) < 0.9, -torch.inf)
    at = torch.randperm(r, generator=g, device=device)
    rank = torch.arange(r, device=device)
    temperature = 0.6 + 0.1 * (rank % 8).double()
    # Kinds of rows: top-p, top-k, both, min-p, all three, a top-k that few rows can hold.
    kind = torch.full_like(rank, size["kind"]) if "kind" in size else rank % 6
    top_p = torch.where((kind == 0) | (kind == 2) | (kind == 4), 0.9 + 0.02 * (rank % 4), 1.0).double()
    top_k = torch.where((kind == 1) | (kind == 2) | (kind == 4), 1 + 37 * (rank % 7), 0)
    top_k = torch.where(kind == 5, vocab // 3, top_k)
    log_min_p = torch.where((kind == 3) | (kind == 4), 0.01 + 0.1 * (rank % 5), 0.0).double().log()
    args = (logits, at, temperature, log_min_p, top_k, top_p)
    return Inputs(args, least_bytes=size_of(logits))


def _token_logprobs(g: torch.Generator, size: dict[str, int]) -> Inputs:
    n, vocab, device = size["n"], size["v"], g.device
    logits = torch.randn(n, vocab, generator=g, device=device) * 2
    if size.get("ties"):
        logits = logits.round()
    if size.get("holes"):
        logits[:, size["holes"] :] = -torch.inf
    at = torch.randperm(n, generator=g, device=device)
    tokens = logits[at].argmax(1)
    return Inputs((logits, at, tokens, size["count"]), least_bytes=size_of(logits))


def _near_logs(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """A float32 rounding apart; of what cannot be, minus infinity."""
    wrong = ~torch.isclose(got, want, rtol=2.0**-22, atol=2.0**-22)
    return f"{int(wrong.sum())} of {wrong.numel()} values differ" if bool(wrong.any()) else None


CASES_SAMPLING = (
    Case(
        "token_logprobs",
        _token_logprobs,
        (_near_logs, exact),
        small=(
            {"n": 3, "v": 5003, "count": 20},
            {"n": 2, "v": 9001, "count": 5, "ties": 1},
            {"n": 2, "v": 600, "count": 8, "holes": 5},
            {"n": 2, "v": 40, "count": 0},
        ),
        large=(
            {"n": 256, "v": 128256, "count": 20},
            {"n": 8, "v": 129280, "count": 20},
            {"n": 8, "v": 129280, "count": 20, "ties": 1},
        ),
        compiled=({"n": 2, "v": 128256, "count": 20},),
    ),
    Case(
        "token_borders",
        _token_borders,
        (exact, exact),
        small=(
            {"r": 6, "v": 1203},
            {"r": 6, "v": 3001, "flat": 1},
            {"r": 3, "v": 9001, "flat": 1, "ties": 1, "holes": 1},
            {"r": 2, "v": 40},
        ),
        large=(
            {"r": 256, "v": 128256},
            {"r": 256, "v": 128256, "flat": 1},
            {"r": 256, "v": 128256, "ties": 1},
            {"r": 256, "v": 128256, "ties": 1, "flat": 1},
            {"r": 8, "v": 129280},
            {"r": 8, "v": 129280, "flat": 1},
            {"r": 256, "v": 128256, "kind": 0},
            {"r": 256, "v": 128256, "kind": 1},
            {"r": 256, "v": 128256, "kind": 0, "flat": 1},
        ),
        compiled=({"r": 2, "v": 128256},),
    ),
    Case(
        "sample_tokens",
        _sample_tokens,
        (exact,),
        small=(
            {"m": 4, "vocab": 1030, "greedy": 3},
            {"m": 4, "vocab": 9001, "cold": 1},
            {"m": 2, "vocab": 9001, "bits": 64, "spread": 3},
        ),
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
