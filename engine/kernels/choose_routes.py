# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Choice of experts from router products: square root of softplus, biases that steer, best k, normalised weights."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses; a program has a row."""

    warps: int
    pdl: bool


def shape_of(experts: int) -> Shape:
    """Return the shape for so many experts."""
    return Shape(1 if experts <= 64 else 4, pdl=overlaps())


@kernel
def _choose_routes(
    LOGITS, BIAS, KINDS, CHOSEN, WEIGHTS, temperature, eps, scale,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    inside = at < E
    kind = tl.load(KINDS + row)
    z = tl.load(LOGITS + row.to(tl.int64) * E + at, mask=inside, other=0.0) / temperature
    # log(1 + y) by way of the rounded sum, which is exact to the last bits for small y.
    y = tl.exp(-tl.abs(z))
    sum_of = 1.0 + y
    small = tl.where(sum_of == 1.0, y, tl.log(sum_of) * (y / (sum_of - 1.0)))
    score = tl.sqrt_rn(tl.maximum(z, 0.0) + small)
    steered = score + tl.load(BIAS + tl.maximum(kind, 0) * E + at, mask=inside, other=0.0)
    steered = tl.where(inside, steered, float("-inf"))
    chosen = tl.zeros((EXPERTS,), tl.int32)
    for _ in tl.static_range(K):
        most = tl.max(steered, axis=0)
        best = tl.min(tl.where((steered == most) & inside & (chosen == 0), at, EXPERTS), axis=0)
        chosen = tl.where(at == best, 1, chosen)
        steered = tl.where(at == best, float("-inf"), steered)
    weight = score
    if K > 1:
        weight = score / (tl.sum(tl.where(chosen > 0, score, 0.0), axis=0) + eps)
    place = row * K + tl.cumsum(chosen, axis=0) - chosen
    tl.store(CHOSEN + place, tl.where(kind < 0, -1, at), mask=chosen > 0)
    tl.store(WEIGHTS + place, weight * scale, mask=chosen > 0)


def choose_routes(
    logits: torch.Tensor, bias: torch.Tensor, kinds: torch.Tensor, k: int, temperature: float, eps: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts int32 [t, k], ascending, and their weights float32 [t, k].

    `logits` float32 [t, E]; `bias` float32 [kinds, E] is added for the choice only; `kinds` int32 [t] says which one, -1:
    the row goes nowhere (experts -1). Scores are sqrt(softplus(logits / temperature)); ties go to the lowest expert;
    with k > 1 weights are divided by their sum + eps; all are multiplied by `scale`.
    """
    rows, experts = logits.shape
    chosen = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    if rows:
        shape = shape_of(experts)
        _choose_routes[(rows,)](
            logits, bias, kinds, chosen, weights, temperature, eps, scale,
            E=experts, EXPERTS=next_power_of_2(experts), K=k, PDL=shape.pdl, num_warps=shape.warps,
            **options(shape.pdl),
        )  # fmt: skip
    return chosen, weights
