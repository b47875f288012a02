"""Cases of the ops around attention and experts of V4.1: dense products, gates, roundings, n-grams, candidate blocks."""

import torch

from benchmarks.kernel_case import Case, Inputs, close, exact, few_bytes, normal, poisoned, size_of, turns
from engine.kernels.reference.formats import decode_q4, q4, q8
from engine.kernels.shards import NgramColumns, shards_of

Size = dict[str, int]
EPS = 1e-20
PRODUCT = close(2.0**-7, 2e-2)
"""One rounding to bfloat16, plus float32 sums in another order over thousands of products near one."""


def e4m3_weight(g: torch.Generator, groups: int, out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and block scales of a weight that keeps products near one."""
    values = torch.randn(groups, out, inner, generator=g, device=g.device)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    low = 126 - int(inner).bit_length() // 2
    shape = (groups, -(-out // 32), inner // 32)
    return codes, torch.randint(low, low + 3, shape, dtype=torch.uint8, generator=g, device=g.device)


def _dense_linear(g: torch.Generator, size: Size) -> Inputs:
    t, n, k, groups = size["t"], size["n"], size["k"], size.get("g", 1)
    codes, scales = q8(normal(g, t, groups * k))
    weight, weight_scales = e4m3_weight(g, groups, n, k)
    moved = size_of(codes, scales, weight, weight_scales) + 2 * t * groups * n
    keywords: dict[str, object] = {"fixed": True} if size.get("fixed") else {}
    flops = 2.0 * t * groups * n * k
    return Inputs((codes, scales, weight, weight_scales), least_bytes=moved, flops=flops, keywords=keywords)


def _plain_linear(g: torch.Generator, size: Size) -> Inputs:
    t, n, k = size["t"], size["n"], size["k"]
    x = normal(g, t, k)
    weight = (torch.randn(n, k, generator=g, device=g.device) * k**-0.5).bfloat16()
    return Inputs((x, weight), least_bytes=size_of(x, weight) + 4 * t * n, flops=2.0 * t * n * k)


def _choose_routes(g: torch.Generator, size: Size) -> Inputs:
    t, experts = size["t"], size["e"]
    # Multiples of a quarter: many ties.
    logits = (torch.randn(t, experts, generator=g, device=g.device) * 8).round() / 4
    bias = torch.randint(-2, 3, (2, experts), generator=g, device=g.device) / 16
    kinds = torch.randint(-1, 2, (t,), dtype=torch.int32, generator=g, device=g.device)
    return Inputs(
        (logits, bias, kinds, size["k"], 1.0, EPS, 1.5), least_bytes=size_of(logits, kinds) + 8 * t * size["k"]
    )


def _turn_heads(g: torch.Generator, size: Size) -> Inputs:
    t, heads, width, pairs = size["t"], size["h"], size["d"], size["r"] // 2
    cos, sin = turns(g, t, pairs)
    x = normal(g, t, heads, width)
    return Inputs((x, cos, sin), written=(0,), least_bytes=8 * t * heads * pairs + size_of(cos, sin))


def _index_queries(g: torch.Generator, size: Size) -> Inputs:
    x = normal(g, size["t"], 32, size["w"])
    x[0, 0] = 0
    cos, sin = turns(g, size["t"], size["w"] // 4)
    return Inputs((x, cos, sin), least_bytes=2 * size_of(x) + size_of(cos, sin))


def _quantize_rows(g: torch.Generator, size: Size) -> Inputs:
    x = normal(g, size["t"], size["n"])
    x[0] = 0
    return Inputs((x,), least_bytes=size_of(x) * 97 // 64)


def _swiglu_quantize(g: torch.Generator, size: Size) -> Inputs:
    x = normal(g, size["t"], 2 * size["i"])
    return Inputs((x, 10.0), least_bytes=size_of(x) + x.numel() * 33 // 64)


def _engram_lookup(g: torch.Generator, size: Size) -> Inputs:
    t, width, count, each = size["t"], size["w"], size["c"], size["rows"]
    device = g.device
    vocab = size.get("zipf", 1000)
    ngrams = torch.randint(-1, vocab, (t, 4), generator=g, device=device)
    if "zipf" in size:
        # Of one text whose ids are as frequent as their ranks are low: a power of uniform numbers.
        ids = (vocab ** torch.rand(t + 3, generator=g, device=device)).long() - 1
        ngrams = ids.unfold(0, 4, 1).flip(1).contiguous()
    # Column heights need not be primes for the arithmetic; sums of them are the height of the table.
    heights = each - torch.arange(count, device=device)
    offsets = heights.cumsum(0) - heights
    total = int(heights.sum())
    codes = torch.randint(0, 256, (total, width), dtype=torch.uint8, generator=g, device=device)
    scales = torch.randint(100, 140, (total, width // 32), dtype=torch.uint8, generator=g, device=device)
    cut = -(-total // size["shards"])
    if size.get("host"):
        codes, scales = (part.cpu().pin_memory() for part in (codes, scales))
    table = shards_of(codes.split(cut), scales.split(cut), device)
    multipliers = 2 * torch.randint(0, 46539438283891, (4,), generator=g, device=device) + 1
    token_map = torch.randint(0, 99092, (vocab,), generator=g, device=device)
    columns = NgramColumns(multipliers, heights, offsets, 7)
    return Inputs((ngrams, token_map, columns, table), least_bytes=size_of(ngrams) + 2 * t * count * width * 33 // 32)


def _engram_gate(g: torch.Generator, size: Size) -> Inputs:
    t, d = size["t"], size["d"]
    streams, projected = normal(g, t, 4, d), normal(g, t, 5 * d)
    weight = 1 + 0.1 * torch.randn(4, d, generator=g, device=g.device)
    skip = torch.rand(t, generator=g, device=g.device) < 0.2
    return Inputs(
        (streams, projected, weight, skip, EPS), least_bytes=2 * size_of(streams) + size_of(projected, weight)
    )


def _block_scores(g: torch.Generator, size: Size) -> Inputs:
    t, n, top, per_page = size["t"], size["n"], size["k"], 256 // size["m"]
    held = -(-n // per_page)
    heads = decode_q4(*q4(torch.randn(t, 32, 128, generator=g, device=g.device))).bfloat16()
    weight = (0.5 + torch.randn(t, 32, generator=g, device=g.device)) / 64
    stride = per_page * 68
    codes, scales = (poisoned(t * held + 1, per_page, width, stride=stride, device=g.device) for width in (64, 4))
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=g, device=g.device))
    scales.copy_(torch.randint(120, 130, scales.shape, dtype=torch.uint8, generator=g, device=g.device))
    pages = 1 + torch.randperm(t * held, generator=g, device=g.device).view(t, held).int()
    blocks = torch.rand(t, -(-n // 8), generator=g, device=g.device).topk(top, dim=1).indices.sort(1).values.int()
    blocks[0, top // 2 :] = -1
    visible = (torch.full((t,), n, device=g.device) - torch.arange(t, device=g.device) % 5).int()
    read = t * top * (8 * 72 + 4) + size_of(heads, weight)
    return Inputs(
        (heads, weight, codes, scales, pages, visible, blocks, 8), least_bytes=read, flops=2.0 * t * top * 8 * 32 * 128
    )


def _block_scores_close(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if not torch.equal(got.isneginf(), want.isneginf()):
        return "another set of entries is scored"
    return close(1e-5, 2e-5)(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0))


V41_CASES = (
    Case(
        "dense_linear",
        _dense_linear,
        (PRODUCT,),
        small=(
            {"t": 1, "n": 96, "k": 96},
            {"t": 19, "n": 40, "k": 128},
            {"t": 3, "n": 64, "k": 64, "g": 3},
            {"t": 2, "n": 40, "k": 512, "g": 2},
            {"t": 513, "n": 40, "k": 64, "g": 2},
        ),
        large=(
            {"t": 8, "n": 1792, "k": 5120},
            {"t": 8, "n": 32768, "k": 1280},
            {"t": 64, "n": 32768, "k": 1280},
            {"t": 8, "n": 1024, "k": 4096, "g": 8},
            {"t": 64, "n": 5120, "k": 8192},
            {"t": 256, "n": 4608, "k": 5120},
            {"t": 8192, "n": 5120, "k": 8192},
            {"t": 8192, "n": 5120, "k": 8192, "fixed": 1},
        ),
        compiled=(
            {"t": 8, "n": 8192, "k": 1280},
            {"t": 8, "n": 1792, "k": 1280},
            {"t": 128, "n": 8192, "k": 1280},
            {"t": 640, "n": 1792, "k": 1280, "fixed": 1},
        ),
    ),
    Case(
        "plain_linear",
        _plain_linear,
        (close(1e-5, 2e-4),),
        small=({"t": 1, "n": 40, "k": 96}, {"t": 18, "n": 32, "k": 128}),
        large=(
            {"t": 8, "n": 384, "k": 5120},
            {"t": 8, "n": 1024, "k": 5120},
            {"t": 8, "n": 129280, "k": 5120},
            {"t": 8192, "n": 384, "k": 5120},
        ),
        compiled=({"t": 8, "n": 384, "k": 1024}, {"t": 8, "n": 8192, "k": 1024}),
    ),
    Case(
        "choose_routes",
        _choose_routes,
        (exact, close(2e-6, 1e-7)),
        small=({"t": 9, "e": 8, "k": 2}, {"t": 5, "e": 24, "k": 1}),
        large=({"t": 8, "e": 384, "k": 6}, {"t": 8192, "e": 384, "k": 6}),
    ),
    Case(
        "turn_heads",
        _turn_heads,
        (exact,),
        small=({"t": 2, "h": 4, "d": 64, "r": 16}, {"t": 1, "h": 6, "d": 96, "r": 24}),
        large=({"t": 8, "h": 64, "d": 512, "r": 64}, {"t": 8192, "h": 64, "d": 512, "r": 64}),
    ),
    Case(
        "index_queries",
        _index_queries,
        (exact,),
        small=({"t": 3, "w": 32}, {"t": 1, "w": 128}),
        large=({"t": 8, "w": 128}, {"t": 8192, "w": 128}),
    ),
    Case(
        "quantize_rows",
        _quantize_rows,
        (exact, exact),
        small=({"t": 3, "n": 96}, {"t": 2, "n": 2048}),
        large=({"t": 8, "n": 32768}, {"t": 8192, "n": 8192}),
    ),
    Case(
        "swiglu_quantize",
        _swiglu_quantize,
        (few_bytes(0.01), few_bytes(0.01)),
        small=({"t": 3, "i": 96}, {"t": 1, "i": 1056}),
        large=({"t": 8, "i": 2304}, {"t": 8192, "i": 2304}),
    ),
    Case(
        "engram_lookup",
        _engram_lookup,
        (exact, exact),
        small=(
            {"t": 5, "w": 32, "c": 6, "rows": 50, "shards": 1},
            {"t": 3, "w": 64, "c": 6, "rows": 40, "shards": 3},
            {"t": 9, "w": 32, "c": 6, "rows": 50, "shards": 1, "zipf": 300},
        ),
        large=(
            {"t": 8, "w": 256, "c": 24, "rows": 40000, "shards": 1},
            {"t": 8192, "w": 256, "c": 24, "rows": 40000, "shards": 4},
            {"t": 8192, "w": 256, "c": 24, "rows": 40000, "shards": 4, "host": 1},
        ),
        compiled=tuple({"t": t, "w": 256, "c": 24, "rows": 50, "shards": 1} for t in (5, 600)),
    ),
    Case(
        "engram_gate",
        _engram_gate,
        # Where a stream and its addend, up to 2^6, cancel, what is left of them is the gate's float32 rounding.
        (close(2.0**-7, 1e-4),),
        small=({"t": 3, "d": 96}, {"t": 1, "d": 1056}),
        large=({"t": 8, "d": 5120}, {"t": 8192, "d": 5120}),
    ),
    Case(
        "block_scores",
        _block_scores,
        (_block_scores_close,),
        small=({"t": 2, "n": 300, "k": 20, "m": 1},),
        large=({"t": 8, "n": 131072, "k": 2048, "m": 1}, {"t": 48, "n": 32768, "k": 2048, "m": 1}),
        compiled=({"t": 2, "n": 512, "k": 40, "m": 1},),
    ),
)
