"""The cases of every kernel: what CI runs in the interpreter and compiles, and what a GPU checks and times."""

from dataclasses import replace

import torch

from benchmarks.kernel_case import (
    NEAR_BF16,
    Case,
    Inputs,
    close,
    exact,
    few_bytes,
    normal,
    packed,
    poisoned,
    size_of,
    turns,
)
from benchmarks.kernel_cases_attention import CASES_ATTENTION
from benchmarks.kernel_cases_experts import EXPERT_CASES
from benchmarks.kernel_cases_sampling import CASES_SAMPLING
from benchmarks.kernel_cases_step import STEP_CASES
from benchmarks.kernel_cases_v41 import V41_CASES
from engine.kernels.reference.formats import decode_q4, q4, q8

EPS = 1e-20
Size = dict[str, int]


def weights(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Return float32 norm weights around one."""
    return 1 + 0.1 * torch.randn(*shape, generator=g, device=g.device)


def places(g: torch.Generator, rows: int, records: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct (record, at) int64 [rows]."""
    chosen = torch.randperm(records * each, generator=g, device=g.device)[:rows]
    return chosen // each, chosen % each


def _rms_quantize(g: torch.Generator, size: Size) -> Inputs:
    x, w = normal(g, size["t"], size["d"]), weights(g, size["d"])
    x[0] = 0
    return Inputs((x, w, EPS), least_bytes=2 * size_of(x) + x.numel() * 33 // 32 + size_of(w))


def _codes_of_y(outputs: tuple[torch.Tensor, ...]) -> str | None:
    """Codes and scales are exactly those of the bfloat16 output."""
    *_, y, codes, scales = outputs
    want = q8(y)
    return exact(codes, want[0]) or exact(scales, want[1])


def _store_window(g: torch.Generator, size: Size) -> Inputs:
    t, ring = size["t"], 134
    rows = poisoned(size["records"], ring, 528, stride=40 * ring * 528, device=g.device)
    record, at = places(g, t, size["records"], ring)
    record[::7] = -1
    x, w = normal(g, t, 768)[:, 256:], weights(g, 512)
    cos, sin = turns(g, t)
    return Inputs(
        (x, w, cos, sin, record, at, rows, EPS),
        written=(6,),
        least_bytes=size_of(x, cos, sin, record, at) + t * 528,
    )


def _commit_ring(g: torch.Generator, size: Size) -> Inputs:
    k, ring, width = size["k"], 134, size.get("w", 528)
    rows = poisoned(size["records"], ring, width, stride=40 * ring * width, device=g.device)
    source = torch.randint(0, 255, (2 * k, width), dtype=torch.uint8, generator=g, device=g.device)
    tokens = torch.randperm(2 * k, generator=g, device=g.device)[:k]
    record, at = places(g, k, size["records"], ring)
    record[3::5] = -1
    return Inputs((source, tokens, record, at + 2 * ring, rows), written=(4,), least_bytes=k * (2 * width + 24))


def _store_entries(g: torch.Generator, size: Size) -> Inputs:
    n, m, each = size["n"], size["m"], 256 // size["m"]
    pages = -(-n // each) + 1
    stride = each * (288 + 68)
    parts = [poisoned(pages, each, width, stride=stride, device=g.device) for width in (288, 64, 4)]
    pending = torch.randn(n * m + 1, m, 512, generator=g, device=g.device)
    index = torch.randperm(n * m + 1, generator=g, device=g.device)[: n * m].view(n, m)
    norm, key_norm = weights(g, 512), weights(g, 128)
    wk = (torch.randn(128, 512, generator=g, device=g.device) * 512**-0.5).bfloat16()
    cos, sin = turns(g, n)
    page, at = places(g, n, pages, each)
    page[2::7] = -1
    return Inputs(
        (pending, index, norm, wk, key_norm, cos, sin, page, at, *parts, EPS),
        written=(9, 10, 11),
        least_bytes=size_of(pending, index, wk, cos, sin, page, at) + n * 356,
    )


def _index_scores(g: torch.Generator, size: Size) -> Inputs:
    b, each, n, per_page = size["b"], size["rows"], size["n"], 256 // size["m"]
    held = -(-n // per_page)
    # Rows of one prompt have its pages, each for itself.
    owners = 1 if "shared" in size else b
    heads, weight = index_queries(g, b * each)
    stride = per_page * 68
    codes, scales = (poisoned(owners * held + 1, per_page, width, stride=stride, device=g.device) for width in (64, 4))
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=g, device=g.device))
    scales.copy_(torch.randint(120, 130, scales.shape, dtype=torch.uint8, generator=g, device=g.device))
    pages = 1 + torch.randperm(owners * held, generator=g, device=g.device).view(owners, held).int()
    pages = pages.repeat(b // owners, 1)
    last = torch.full((b, 1), n, device=g.device) - torch.arange(b, device=g.device)[:, None] % 7
    visible = (last - torch.arange(each - 1, -1, -1, device=g.device)).clamp(min=0).int().flatten()
    scores = torch.full((b * each, held * per_page), torch.nan, device=g.device)
    # Uneven: each, each - 2 .. rows, then each - 1 ..: some sequences have none, and the last rows are nobody's.
    fewer = 2 * torch.arange(b) % (each + 1) if "uneven" in size else torch.zeros(b, dtype=torch.int64)
    starts = torch.nn.functional.pad((each - fewer).cumsum(0), (1, 0)).int()
    rows, sequences = int(starts[-1]), min(owners, int((fewer < each).sum()))
    return Inputs(
        (heads, weight, codes, scales, pages, visible, scores),
        written=(6,),
        least_bytes=sequences * n * 68 + size_of(heads[:rows], weight[:rows]) + rows * n * 4,
        flops=2.0 * rows * n * 32 * 128,
        keywords={"starts": starts.to(g.device), "each": each} if "uneven" in size else {},
    )


def index_queries(g: torch.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads bfloat16 [rows, 32, 128] of the index format, and their weights float32, some negative."""
    heads = decode_q4(*q4(torch.randn(rows, 32, 128, generator=g, device=g.device))).bfloat16()
    return heads, (0.5 + torch.randn(rows, 32, generator=g, device=g.device)) / 64


def _scores_close(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Scores of float32 sums in another order; what is not visible is left alone (it was NaN)."""
    if not torch.equal(got.isnan(), want.isnan()):
        return "another set of scores is written"
    return close(1e-5, 2e-5)(got.nan_to_num(), want.nan_to_num())


def _select_top(g: torch.Generator, size: Size) -> Inputs:
    t, n, block = size["t"], size["n"], size.get("block", 1)
    scores = torch.randn(t, n, generator=g, device=g.device)
    # Many ties, among them around the border; some scores that may not be chosen.
    scores = torch.where(scores > 0.5, (scores * 16).round() / 16, scores)
    scores[:, 5::97] = -torch.inf
    if block == 1:
        scores[:, 3::89] = torch.nan
    visible = (torch.full((t,), n, device=g.device) - 3 * torch.arange(t, device=g.device)).clamp(min=0).int()
    visible[t // 2] = min(n, size["k"] * block // 2)
    return Inputs((scores, visible, size["k"], block), least_bytes=t * n * 4 + t * size["k"] * 4)


def _sort_routes(g: torch.Generator, size: Size) -> Inputs:
    chosen = torch.randint(-1, size["e"], (size["t"], size["k"]), generator=g, device=g.device).int()
    return Inputs((chosen, size["e"]), least_bytes=2 * size_of(chosen))


def _sparse_attention(g: torch.Generator, size: Size) -> Inputs:
    b, each, n, top, heads = size["b"], size["rows"], size["n"], size["k"], size["h"]
    t, per_page, held = b * each, 128, -(-n // 128)
    queries = (2 * torch.randn(t, heads, 512, generator=g, device=g.device)).bfloat16()
    ring = poisoned(b, 134, 528, stride=size.get("layers", 20) * 134 * 528, device=g.device)
    ring.copy_(torch.cat(q8(torch.randn(b, 134, 512, generator=g, device=g.device)), -1))
    entries = poisoned(b * held + 1, per_page, 288, stride=per_page * 356, device=g.device)
    # Any codes are values up to 6, scales are 0.19 .. 0.37: near one, without gigabytes of numbers to round.
    entries.copy_(torch.randint(0, 256, entries.shape, dtype=torch.uint8, generator=g, device=g.device))
    spread = (*entries.shape[:2], 32)
    entries[..., 256:] = torch.randint(36, 44, spread, dtype=torch.uint8, generator=g, device=g.device)
    pages = 1 + torch.randperm(b * held, generator=g, device=g.device).view(b, held).int()
    owner = torch.arange(b, device=g.device).repeat_interleave(each)
    positions = 2 * n - each + torch.arange(each, device=g.device).repeat(b)
    chosen = torch.rand(t, n, generator=g, device=g.device).topk(min(top, n), dim=1).indices.sort(1).values.int()
    selection = torch.full((t, top), -1, dtype=torch.int32, device=g.device)
    selection[:, : chosen.shape[1]] = chosen
    if top and t > 1:
        selection[1, top // 3 :] = -1
    floors = torch.zeros(t, dtype=torch.int64, device=g.device)
    floors[0] = positions[0] - 20
    cos, sin = turns(g, t)
    args = (queries, ring, owner, positions, floors, 128, entries, pages, owner, selection)
    read = 2 * size_of(queries) + b * (127 + each) * 528 + t * min(top, n) * 288
    return Inputs(
        (*args, torch.randn(heads, generator=g, device=g.device), cos, sin, size["splits"]),
        least_bytes=read,
        flops=4.0 * t * heads * 512 * (128 + min(top, n)),
    )


def _sparse_attention_quantized(g: torch.Generator, size: Size) -> Inputs:
    inputs = _sparse_attention(g, size)
    return replace(inputs, keywords={"quantized": True})


ATTENDED = close(2.0**-6, 6e-3)
"""Softmax weights and the output are rounded to bfloat16; values are near one."""


CASES = (
    Case(
        "rms_quantize",
        _rms_quantize,
        (NEAR_BF16, few_bytes(0.01), few_bytes(0.01)),
        small=({"t": 3, "d": 256}, {"t": 1, "d": 1056}),
        large=({"t": 8, "d": 5120}, {"t": 256, "d": 5120}, {"t": 8192, "d": 5120}, {"t": 8192, "d": 1280}),
        consistent=_codes_of_y,
    ),
    Case(
        "store_window",
        _store_window,
        (packed(512, 8, 32),),
        small=({"t": 1, "records": 1}, {"t": 9, "records": 2}),
        large=({"t": 64, "records": 64}, {"t": 1536, "records": 256}, {"t": 8192, "records": 256}),
    ),
    Case(
        "commit_ring",
        _commit_ring,
        (exact,),
        small=({"k": 1, "records": 1}, {"k": 7, "records": 2}, {"k": 5, "records": 2, "w": 66}),
        large=({"k": 134, "records": 256}, {"k": 8192, "records": 256}),
    ),
    Case(
        "store_entries",
        _store_entries,
        (packed(512, 4, 16), few_bytes(0.01), few_bytes(0.01)),
        small=({"n": 1, "m": 2}, {"n": 19, "m": 1}, {"n": 5, "m": 2}),
        large=({"n": 64, "m": 2}, {"n": 4096, "m": 2}, {"n": 8192, "m": 1}),
    ),
    Case(
        "index_scores",
        _index_scores,
        (_scores_close,),
        small=(
            {"b": 2, "rows": 1, "n": 130, "m": 2},
            {"b": 1, "rows": 3, "n": 300, "m": 1},
            {"b": 2, "rows": 6, "n": 1000, "m": 2},
            {"b": 4, "rows": 6, "n": 300, "m": 1, "uneven": 1},
            {"b": 3, "rows": 1, "n": 200, "m": 2, "shared": 1},
        ),
        large=(
            {"b": 8, "rows": 1, "n": 65536, "m": 2},
            {"b": 32, "rows": 1, "n": 65536, "m": 2},
            {"b": 8, "rows": 4, "n": 65536, "m": 2},
            {"b": 8, "rows": 6, "n": 65536, "m": 2},
            {"b": 8, "rows": 6, "n": 65536, "m": 2, "uneven": 1},
            {"b": 8, "rows": 1, "n": 131072, "m": 1},
            {"b": 64, "rows": 1, "n": 4096, "m": 2},
        ),
        compiled=(
            {"b": 2, "rows": 1, "n": 256, "m": 2},
            *({"b": 2, "rows": rows, "n": 256, "m": 2, "uneven": 1} for rows in (2, 4, 6, 8)),
        ),
    ),
    Case(
        "select_top",
        _select_top,
        (exact,),
        small=(
            {"t": 3, "n": 700, "k": 64},
            {"t": 2, "n": 40, "k": 64},
            {"t": 2, "n": 9000, "k": 64},
            {"t": 3, "n": 999, "k": 16, "block": 8},
        ),
        large=(
            {"t": 8, "n": 65536, "k": 512},
            {"t": 48, "n": 65536, "k": 512},
            {"t": 8, "n": 131072, "k": 512},
            {"t": 8, "n": 131072, "k": 2048, "block": 8},
            {"t": 64, "n": 4096, "k": 512},
            {"t": 1, "n": 1048576, "k": 512},
        ),
        compiled=({"t": 2, "n": 65536, "k": 512},),
    ),
    Case(
        "sort_routes",
        _sort_routes,
        (exact, exact),
        small=({"t": 1, "k": 2, "e": 4}, {"t": 50, "k": 3, "e": 7}),
        large=({"t": 64, "k": 6, "e": 384}, {"t": 8192, "k": 6, "e": 384}),
    ),
    *EXPERT_CASES,
    Case(
        "sparse_attention",
        _sparse_attention,
        (ATTENDED,),
        small=(
            {"b": 1, "rows": 2, "n": 200, "k": 64, "h": 16, "splits": 1},
            {"b": 2, "rows": 1, "n": 100, "k": 128, "h": 16, "splits": 3},
            {"b": 1, "rows": 1, "n": 40, "k": 0, "h": 16, "splits": 2},
        ),
        large=(
            {"b": 8, "rows": 1, "n": 8192, "k": 512, "h": 64, "splits": 10},
            {"b": 8, "rows": 4, "n": 8192, "k": 512, "h": 64, "splits": 4},
            {"b": 64, "rows": 4, "n": 2048, "k": 512, "h": 64, "splits": 1},
            {"b": 256, "rows": 4, "n": 1024, "k": 512, "h": 64, "splits": 1},
            {"b": 8, "rows": 150, "n": 1024, "k": 0, "h": 16, "splits": 1, "layers": 1},
        ),
        compiled=tuple({"b": 1, "rows": 2, "n": 1024, "k": 512, "h": 64, "splits": splits} for splits in (4, 1)),
        by_chip=True,
    ),
    Case(
        "sparse_attention",
        _sparse_attention_quantized,
        (few_bytes(0.1), few_bytes(0.02)),
        small=({"b": 1, "rows": 1, "n": 40, "k": 64, "h": 16, "splits": 2},),
        large=(
            {"b": 8, "rows": 1, "n": 8192, "k": 512, "h": 64, "splits": 10, "quantized": 1},
            {"b": 64, "rows": 4, "n": 2048, "k": 512, "h": 64, "splits": 1, "quantized": 1},
        ),
        compiled=tuple({"b": 1, "rows": 2, "n": 1024, "k": 512, "h": 64, "splits": splits} for splits in (4, 1)),
        by_chip=True,
    ),
    *CASES_ATTENTION,
    *CASES_SAMPLING,
    *V41_CASES,
    *STEP_CASES,
)
