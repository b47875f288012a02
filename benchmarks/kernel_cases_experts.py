"""Cases of the expert products and of routes that lead to them, even and uneven; see `benchmarks.kernel_cases`."""

import torch

from benchmarks.kernel_case import Case, Check, Inputs, close, few_bytes, normal, size_of
from engine.kernels.reference.formats import q8
from engine.kernels.reference.sort_routes import sort_routes
from engine.kernels.shards import Shards, shards_of

Size = dict[str, int]


def _uneven_choice(g: torch.Generator, size: Size) -> torch.Tensor:
    """Return experts int32 [t, k], in hundredths: one has `skew` times the mean, or shares fall by the power `zipf`."""
    experts, pairs = size["e"], size["t"] * size["k"]
    rank = torch.arange(experts, device=g.device) + 1.0
    if "zipf" in size:
        share = rank ** -(size["zipf"] / 100)
    else:
        most = size["skew"] / 100
        share = torch.where(rank == 1, most, (experts - most) / (experts - 1))
    ends = (share.cumsum(0) / share.sum() * pairs).round()
    owner = torch.searchsorted(ends, torch.arange(pairs, device=g.device) + 0.5, right=True).clamp(max=experts - 1)
    return owner[torch.randperm(pairs, generator=g, device=g.device)].view(size["t"], size["k"]).int()


def routed(g: torch.Generator, size: Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pair order and offsets of random routes, balanced or not, and their weights float32 [t, k]."""
    t, k, experts = size["t"], size["k"], size["e"]
    if "skew" in size or "zipf" in size:
        chosen = _uneven_choice(g, size)
    else:
        chosen = torch.rand(t, experts, generator=g, device=g.device).topk(k, dim=1).indices.int()
    if t > 2:
        chosen[1, 0] = -1
    weight = 0.5 * torch.rand(t, k, generator=g, device=g.device)
    return *sort_routes(chosen, experts), weight


def fp4_weights(g: torch.Generator, size: Size, out: int, inner: int) -> Shards:
    """Return tiled random weights of a size that keeps products near one, in as many buffers as there are shards."""
    experts, each = size["e"], -(-size["e"] // size.get("shards", 1))
    # Any words are some weight.
    tiles = (experts, out // 64, inner // 128, 64)
    words = torch.randint(-(1 << 31), 1 << 31, (*tiles, 16), dtype=torch.int32, generator=g, device=g.device)
    low = 124 - int(inner).bit_length() // 2
    scales = torch.randint(low, low + 3, (*tiles, 4), dtype=torch.uint8, generator=g, device=g.device)
    codes, spread = ([part.clone() for part in one.split(each)] for one in (words, scales))
    return shards_of(codes, spread, g.device)


def _experts_up(g: torch.Generator, size: Size) -> Inputs:
    d, inner = size["d"], size["i"]
    codes, scales = q8(normal(g, size["t"], d))
    order, offsets, weight = routed(g, size)
    w = fp4_weights(g, size, 2 * inner, d)
    pairs = int(offsets[-1])
    used = int((offsets[1:] > offsets[:-1]).sum())
    moved = size_of(codes, scales) + (size_of(*w.codes, *w.scales) // size["e"]) * used + pairs * inner * 33 // 32
    return Inputs((codes, scales, order, offsets, w, weight, 10.0), least_bytes=moved, flops=4.0 * pairs * d * inner)


def _experts_down(g: torch.Generator, size: Size) -> Inputs:
    d, inner = size["d"], size["i"]
    order, offsets, _ = routed(g, size)
    codes, scales = q8(normal(g, len(order), inner))
    w = fp4_weights(g, size, d, inner)
    pairs = int(offsets[-1])
    used = int((offsets[1:] > offsets[:-1]).sum())
    moved = size_of(codes, scales) + (size_of(*w.codes, *w.scales) // size["e"]) * used + pairs * d * 2
    return Inputs((codes, scales, order, offsets, w), least_bytes=moved, flops=2.0 * pairs * d * inner)


def _owned(check: Check) -> Check:
    """Compare the places that an expert owns: all but the last few, which pairs without expert leave unwritten."""
    return lambda got, want: check(got[: len(got) - 1], want[: len(want) - 1])


SUM = close(2.0**-7, 2e-2)
"""One rounding to bfloat16, plus float32 sums in another order over thousands of products near one."""

_LARGE = tuple({"t": 48 * rows // 6, "k": 6, "e": 48, "d": 5120, "i": 2304} for rows in (4, 16, 64, 256, 1024))
_COMPILED = (
    *({"t": 16, "k": 2, "e": 2 * n, "d": 1024, "i": 512, "shards": n} for n in (1, 2)),
    *({"t": t, "k": 2, "e": 2, "d": 1024, "i": 512} for t in (4, 50, 128)),
)
"""Of both products."""

EXPERT_CASES = (
    Case(
        "experts_up",
        _experts_up,
        (_owned(few_bytes(0.02)), _owned(few_bytes(0.01))),
        small=(
            {"t": 5, "k": 2, "e": 3, "d": 256, "i": 64},
            {"t": 5, "k": 2, "e": 3, "d": 128, "i": 64, "shards": 2},
            {"t": 40, "k": 2, "e": 3, "d": 256, "i": 128},
            {"t": 100, "k": 2, "e": 3, "d": 128, "i": 64},
            {"t": 40, "k": 2, "e": 3, "d": 128, "i": 64, "skew": 180},
        ),
        large=_LARGE,
        compiled=_COMPILED,
    ),
    Case(
        "experts_down",
        _experts_down,
        (SUM,),
        small=(
            {"t": 5, "k": 2, "e": 3, "d": 128, "i": 256},
            {"t": 2, "k": 2, "e": 3, "d": 128, "i": 128, "shards": 2},
            {"t": 40, "k": 2, "e": 3, "d": 128, "i": 256},
            {"t": 100, "k": 2, "e": 3, "d": 128, "i": 128},
            {"t": 40, "k": 1, "e": 7, "d": 128, "i": 128, "zipf": 120},
        ),
        large=_LARGE,
        compiled=_COMPILED,
    ),
)
