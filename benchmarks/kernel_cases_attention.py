"""Cases of paged attention and of what surrounds it in a block of the Llama family; see `benchmarks.kernel_cases`."""

import torch

from benchmarks.kernel_case import Case, Check, Inputs, close, exact, size_of

Size = dict[str, int]
DTYPES = {16: torch.bfloat16, 32: torch.float32}


def _floats(g: torch.Generator, size: Size, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g, device=g.device).to(DTYPES[size.get("bits", 16)])


def _paged(g: torch.Generator, size: Size, layers: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pages [n, 2, k, p, d], one layer of several, and a table int32 [b, w] of distinct ones; page 0 is NaN."""
    page, width = size.get("page", 64), -(-size["n"] // size.get("page", 64))
    pages = _floats(g, size, size["b"] * width + 1, layers, 2, size["k"], page, size["d"])[:, layers // 2]
    pages[0] = torch.nan
    table = 1 + torch.randperm(size["b"] * width, generator=g, device=g.device).view(size["b"], width).int()
    return pages, table


def _rows(g: torch.Generator, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q_start [b+1] and seq_start [b]: row 0 full, the others a little shorter; with `q`, chunks between decode rows."""
    b, n, q = size["b"], size["n"], size.get("q", 1)
    lengths = n - torch.arange(b) % min(7, n)
    counts = torch.where(torch.arange(b) % 3 == 0, q, 1) if q > 1 else torch.ones(b, dtype=torch.int64)
    if size.get("holes"):
        counts[1::4] = 0
    counts = torch.minimum(counts, lengths)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int().to(g.device), (lengths - counts).int().to(g.device)


def _paged_attention(g: torch.Generator, size: Size) -> Inputs:
    pages, table = _paged(g, size, size.get("layers", 1))
    q_start, seq_start = _rows(g, size)
    tokens = int(q_start[-1])
    query = _floats(g, size, tokens, size["h"], size["d"])
    counts, starts = q_start.diff().double(), seq_start.double()
    read = float(((counts > 0) * (starts + counts)).sum()) * 2 * size["k"] * size["d"] * pages.element_size()
    pairs = float((counts * starts + counts * (counts + 1) / 2).sum())
    return Inputs(
        (query, pages, table, q_start, seq_start, size.get("q", 1), size["splits"], bool(size.get("by_token"))),
        least_bytes=int(read) + 2 * size_of(query),
        flops=4.0 * pairs * size["h"] * size["d"],
    )


ATTENDED: Check = close(2.0**-6, 2.0**-6)
"""Softmax weights are bfloat16, here before and there after they are divided by their sum: errors of 2^-9 of values up to
4 on both sides, where the values themselves cancel."""
NORMED: Check = close(2.0**-6, 1e-6)
"""A first rounding may fall to the other side, and the product with the weight be rounded again."""


def _store_kv(g: torch.Generator, size: Size) -> Inputs:
    t, h, k, d, page = size["t"], size["h"], size["k"], size["d"], size.get("page", 64)
    qkv = _floats(g, size, t, (h + 2 * k) * d)
    angle = torch.rand(512, d // 2, generator=g, device=g.device) * 6.2831853
    cos, sin = angle.cos().to(qkv.dtype), angle.sin().to(qkv.dtype)
    positions = torch.randint(0, 512, (t,), generator=g, device=g.device)
    held = -(-t // page) + 1
    slots = torch.randperm(held * page, generator=g, device=g.device)[:t]
    slots[::5] = -1
    pages = torch.zeros(held, 3, 2, k, page, d, dtype=qkv.dtype, device=g.device)[:, 1]
    return Inputs((qkv, cos, sin, positions, slots, pages), written=(5,), least_bytes=2 * size_of(qkv) + t * d * 2)


def _add_norm(g: torch.Generator, size: Size) -> Inputs:
    x, delta = _floats(g, size, size["t"], size["d"]), _floats(g, size, size["t"], size["d"])
    weight = (1 + 0.1 * torch.randn(size["d"], generator=g, device=g.device)).to(x.dtype)
    plain = bool(size.get("plain"))
    moved = size_of(x) * (2 if plain else 4)
    return Inputs((x, None if plain else delta, weight, 1e-5), written=(0,), least_bytes=moved)


def _silu_mul(g: torch.Generator, size: Size) -> Inputs:
    x = _floats(g, size, size["t"], 2 * size["i"])
    return Inputs((x,), least_bytes=size_of(x) * 3 // 2)


GROUPED = {"h": 32, "k": 8, "d": 128}
CASES_ATTENTION = (
    Case(
        "paged_attention",
        _paged_attention,
        (ATTENDED,),
        small=(
            {"b": 3, "n": 70, "h": 4, "k": 2, "d": 16, "page": 16, "splits": 1, "layers": 3},
            {"b": 5, "n": 300, "h": 3, "k": 1, "d": 32, "page": 16, "splits": 4, "holes": 1, "bits": 32},
            {"b": 4, "n": 90, "h": 6, "k": 2, "d": 16, "page": 32, "splits": 2, "q": 40, "holes": 1},
            {"b": 2, "n": 40, "h": 4, "k": 4, "d": 16, "page": 8, "splits": 1, "q": 40, "bits": 32},
            {"b": 2, "n": 150, "h": 4, "k": 2, "d": 16, "page": 16, "splits": 2, "q": 5, "by_token": 1},
        ),
        large=(
            {"b": 1, "n": 4096, "splits": 32, **GROUPED},
            {"b": 8, "n": 8192, "splits": 16, **GROUPED},
            {"b": 32, "n": 4096, "splits": 4, **GROUPED},
            {"b": 32, "n": 32768, "splits": 4, **GROUPED},
            {"b": 64, "n": 8192, "splits": 2, **GROUPED},
            {"b": 256, "n": 4096, "splits": 1, **GROUPED},
            {"b": 256, "n": 4096, "page": 16, "splits": 1, **GROUPED},
            {"b": 256, "n": 16384, "splits": 1, **GROUPED},
            {"b": 32, "n": 8192, "splits": 8, "by_token": 1, **GROUPED},
            {"b": 1, "n": 8192, "q": 8192, "splits": 1, **GROUPED},
            {"b": 1, "n": 32768, "q": 8192, "splits": 1, **GROUPED},
            {"b": 6, "n": 4096, "q": 2048, "splits": 1, **GROUPED},
            {"b": 4, "n": 600, "q": 200, "splits": 2, "bits": 32, "h": 9, "k": 3, "d": 64, "page": 16},
        ),
        compiled=(
            {"b": 2, "n": 256, "splits": 4, "q": 64, **GROUPED},
            {"b": 2, "n": 64, "splits": 4, "by_token": 1, **GROUPED},
        ),
    ),
    Case(
        "store_kv",
        _store_kv,
        (exact, exact),
        small=(
            {"t": 7, "h": 3, "k": 1, "d": 16, "page": 8},
            {"t": 1, "h": 4, "k": 2, "d": 32, "page": 16, "bits": 32},
        ),
        large=({"t": 1, **GROUPED}, {"t": 256, **GROUPED}, {"t": 8192, **GROUPED}),
    ),
    Case(
        "add_norm",
        _add_norm,
        (NORMED, exact),
        small=({"t": 3, "d": 48}, {"t": 1, "d": 576, "plain": 1, "bits": 32}),
        large=({"t": 1, "d": 4096}, {"t": 256, "d": 4096}, {"t": 8192, "d": 4096}),
    ),
    Case(
        "silu_mul",
        _silu_mul,
        (close(2.0**-7, 2.0**-8),),
        small=({"t": 3, "i": 48}, {"t": 1, "i": 1536, "bits": 32}),
        large=({"t": 1, "i": 14336}, {"t": 256, "i": 14336}, {"t": 8192, "i": 14336}),
    ),
)
