"""Cases of a V4.1 step's layout (tokens, entries, turns, n-grams, chosen entries) and of its residual streams."""

import torch

from benchmarks.kernel_case import NEAR_BF16, Case, Inputs, close, exact, few_bytes, normal, size_of
from engine.kernels.reference.formats import q8, thirds
from engine.kernels.reference.lay_tokens import lay_tokens

Size = dict[str, int]
_IMAGE, _PAGE, _VOCAB, _EPS = 5, 256, 40, 1e-20


def _laid(g: torch.Generator, size: Size) -> tuple[torch.Tensor, ...]:
    """Return ids, positions, slots int64 [t], rows [b], q_start [b + 1], start [b] int32: a sequence without tokens, padding."""
    b, t, device = size["b"], size["t"], g.device
    lengths = torch.randint(0, 2 * t // b + 1, (b,), generator=g, device=device)
    q_start = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).clamp(max=t)
    start = torch.randint(0, 1000, (b,), generator=g, device=device)
    number = torch.arange(t, device=device)
    owner = torch.searchsorted(q_start[1:].contiguous(), number, right=True).clamp(max=b - 1)
    is_real = number < q_start[-1]
    positions = torch.where(is_real, start[owner] + number - q_start[owner], 0)
    slots = torch.where(is_real, (1 + owner) * 4 * _PAGE + positions, -1)
    ids = torch.randint(0, _VOCAB, (t,), generator=g, device=device)
    rows = torch.randperm(2 * b, generator=g, device=device)[:b]
    return ids, positions, slots, rows.int(), q_start.int(), start.int()


def _lay_tokens(g: torch.Generator, size: Size) -> Inputs:
    ids, positions, slots, rows, q_start, _ = _laid(g, size)
    floors = torch.randint(0, 1000, (len(rows),), generator=g, device=g.device) if size.get("floors") else None
    image = _IMAGE if size.get("image") else -1
    read = size_of(ids, positions, slots, rows, q_start)
    return Inputs((ids, positions, slots, rows, q_start, floors, image, (1, 2)), least_bytes=read + 37 * size["t"])


def _lay_entries(g: torch.Generator, size: Size) -> Inputs:
    ids, positions, slots, rows, q_start, start = _laid(g, size)
    owner, record, *_ = lay_tokens(ids, positions, slots, rows, q_start, None, -1, ())
    least = torch.randint(0, 1000, (size["t"],), generator=g, device=g.device) if size.get("least") else None
    read = size_of(positions, slots, owner, record)
    args = (positions, slots, owner, record, q_start, start, least, size["m"], _PAGE, 7)
    return Inputs(args, least_bytes=read + (32 + 8 * size["m"]) * size["t"])


def _rotary_turns(g: torch.Generator, size: Size) -> Inputs:
    positions = torch.randint(0, 1 << 20, (size["t"],), generator=g, device=g.device)
    positions[0] = 0
    frequencies = 10000.0 ** -(torch.arange(size["r"] // 2, device=g.device) * 2 / size["r"])
    return Inputs((positions, frequencies, 1), least_bytes=(8 + 4 * size["r"]) * size["t"])


def _gather_ngrams(g: torch.Generator, size: Size) -> Inputs:
    ids, positions, slots, rows, q_start, _ = _laid(g, size)
    owner, *_ = lay_tokens(ids, positions, slots, rows, q_start, None, -1, ())
    history = torch.randint(-1, _VOCAB, (len(rows), 3), generator=g, device=g.device)
    return Inputs((ids, owner, q_start, history, _IMAGE), least_bytes=size_of(ids, owner, history) + 32 * size["t"])


def _block_entries(g: torch.Generator, size: Size) -> Inputs:
    t, k, blocks = size["t"], size["k"], size["n"]
    chosen = torch.randint(0, 1 << 17, (t, blocks), generator=g, device=g.device).int()
    columns = torch.randint(-1, 8 * blocks, (t, k), generator=g, device=g.device).int()
    return Inputs((columns, chosen, 8), least_bytes=2 * size_of(columns) + 4 * t * min(k, blocks))


def _norm_weights(g: torch.Generator, *shape: int) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(*shape, generator=g, device=g.device)


def _mix_streams(g: torch.Generator, size: Size) -> Inputs:
    t, d = size["t"], size["d"]
    y, x = normal(g, t, d), normal(g, t, 4, d)
    post, pre, comb = (torch.rand(t, *shape, generator=g, device=g.device) for shape in ((4,), (4,), (4, 4)))
    pairs = normal(g, t * size["k"], d) if "k" in size else None
    moved = size_of(y, x, post, pre, comb) + size_of(x, y) + t * d * 33 // 32 + 2 * t * d * size.get("k", 0)
    return Inputs((y, x, post, comb, pre, _norm_weights(g, d), _EPS, pairs), least_bytes=moved)


def _stream_coefficients(g: torch.Generator, size: Size) -> Inputs:
    t, d = size["t"], size["d"]
    x = normal(g, t, 4, d)
    fn = thirds(torch.randn(24, 4 * d, generator=g, device=g.device) * (4 * d) ** -0.5)
    scale, base = _norm_weights(g, 3), 0.3 * torch.randn(24, generator=g, device=g.device)
    moved = size_of(x, fn) + t * 24 * 4
    return Inputs((x, fn, scale, base, _EPS, 1e-6), least_bytes=moved, flops=2.0 * t * 4 * d * 24)


def _collapse_streams(g: torch.Generator, size: Size) -> Inputs:
    t, d = size["t"], size["d"]
    x, pre = normal(g, t, 4, d), torch.rand(t, 4, generator=g, device=g.device)
    weight = _norm_weights(g, d)
    return Inputs((x, pre, weight, _EPS), least_bytes=size_of(x, pre, weight) + t * d * 97 // 32)


def _transposed(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Every bit, rows are the second axis."""
    return exact(got.T, want.T)


def _codes_of_normed(outputs: tuple[torch.Tensor, ...]) -> str | None:
    """Codes and scales are exactly those of the bfloat16 output, the last three."""
    *_, normed, codes, scales = outputs
    want = q8(normed)
    return exact(codes, want[0]) or exact(scales, want[1])


FLOAT = close(2e-5, 2e-6)
"""float32 products in another order, through sigmoids and twenty normalisations."""

STEP_CASES = (
    Case(
        "mix_streams",
        _mix_streams,
        (exact, NEAR_BF16, few_bytes(0.01), few_bytes(0.01)),
        small=({"t": 2, "d": 96}, {"t": 1, "d": 1056}, {"t": 3, "d": 160, "k": 2}),
        large=(
            {"t": 8, "d": 5120},
            {"t": 8, "d": 5120, "k": 6},
            {"t": 256, "d": 5120},
            {"t": 8192, "d": 5120},
            {"t": 8192, "d": 5120, "k": 6},
        ),
        compiled=({"t": 8, "d": 5120}, {"t": 8, "d": 5120, "k": 6}),
        consistent=_codes_of_normed,
    ),
    Case(
        "stream_coefficients",
        _stream_coefficients,
        (FLOAT, FLOAT, FLOAT),
        small=({"t": 3, "d": 512}, {"t": 2, "d": 128}),
        large=({"t": 8, "d": 5120}, {"t": 256, "d": 5120}, {"t": 8192, "d": 5120}),
    ),
    Case(
        "lay_tokens",
        _lay_tokens,
        (*(exact,) * 5, _transposed),
        small=({"b": 1, "t": 1}, {"b": 5, "t": 37, "floors": 1, "image": 1}, {"b": 70, "t": 40}),
        large=({"b": 8, "t": 8}, {"b": 256, "t": 256}, {"b": 4, "t": 8192, "floors": 1, "image": 1}),
    ),
    Case(
        "lay_entries",
        _lay_entries,
        (exact,) * 5,
        small=({"b": 1, "t": 1, "m": 2}, {"b": 5, "t": 37, "m": 2, "least": 1}, {"b": 3, "t": 9, "m": 1}),
        large=({"b": 8, "t": 8, "m": 2}, {"b": 8, "t": 8, "m": 1}, {"b": 4, "t": 8192, "m": 2, "least": 1}),
    ),
    Case(
        "rotary_turns",
        _rotary_turns,
        (close(0.0, 1e-6), close(0.0, 1e-6)),
        small=({"t": 3, "r": 64}, {"t": 1, "r": 24}),
        large=({"t": 8, "r": 64}, {"t": 8192, "r": 64}),
    ),
    Case(
        "gather_ngrams",
        _gather_ngrams,
        (exact,),
        small=({"b": 1, "t": 1}, {"b": 5, "t": 37}),
        large=({"b": 8, "t": 8}, {"b": 4, "t": 8192}),
    ),
    Case(
        "block_entries",
        _block_entries,
        (exact,),
        small=({"t": 3, "k": 20, "n": 5},),
        large=({"t": 8, "k": 512, "n": 2048},),
    ),
    Case(
        "collapse_streams",
        _collapse_streams,
        (NEAR_BF16, few_bytes(0.01), few_bytes(0.01)),
        small=({"t": 2, "d": 96}, {"t": 1, "d": 1056}),
        large=({"t": 8, "d": 5120}, {"t": 8192, "d": 5120}),
        consistent=_codes_of_normed,
    ),
)
