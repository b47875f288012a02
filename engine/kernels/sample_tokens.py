# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Token choice (decision A20) where the logits are: argmax of scaled logit plus counter-based noise, for every row.

As on the host, noise is computed only for tiles that can still win, and sums and comparisons are in float64.
"""

import torch
import triton
import triton.language as tl

from engine.philox import GUMBEL_MAX
from engine.sampling import GREEDY_BELOW

_TILE = 1024
_PART = 8192
"""Tokens a program looks at."""


@triton.jit
def _noise(group, seed, position, sample):
    """Return float64 Gumbel noise [4 n] of the tokens of int32 groups [n], in their order."""
    w0, w1, w2, w3 = tl.philox(seed, position, sample, group, tl.zeros_like(group))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * group.shape[0],))
    uniform = ((words.to(tl.uint32, bitcast=True) >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_parts(
    LOGITS, TEMPERATURE, SEED, POSITION, SAMPLE, BORDER, LAST, BEST, CHOSEN, vocab, row_stride,
    TILE: tl.constexpr, PART: tl.constexpr, GREEDY: tl.constexpr, MARGIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = LOGITS + row.to(tl.int64) * row_stride
    temperature = tl.load(TEMPERATURE + row)
    greedy = temperature < GREEDY
    divisor = tl.where(greedy, 1.0, temperature).to(LOGITS.dtype.element_ty)
    seed = tl.load(SEED + row)
    position = tl.load(POSITION + row).to(tl.int32)
    sample = tl.load(SAMPLE + row).to(tl.int32)
    border = tl.load(BORDER + row)
    last = tl.load(LAST + row)
    best = tl.full((), float("-inf"), tl.float64)
    chosen = tl.full((), 2147483647, tl.int32)
    for begin in range(part * PART, min((part + 1) * PART, vocab), TILE):
        token = begin + tl.arange(0, TILE)
        raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        if LOGITS.dtype.element_ty == tl.float32:
            values = tl.div_rn(raw, tl.broadcast_to(divisor, (TILE,))).to(tl.float64)
        else:
            values = raw / divisor
        if not greedy:
            allowed = (values > border) | ((values == border) & (token <= last))
            values = tl.where(allowed, values, float("-inf"))
        if tl.max(values, axis=0) + tl.where(greedy, 0.0, MARGIN) >= best:
            if not greedy:
                group = begin // 4 + tl.arange(0, TILE // 4)
                values += _noise(group, seed, position, sample)
            most = tl.max(values, axis=0)
            first = tl.min(tl.where((values == most) & (token < vocab), token, 2147483647), axis=0)
            better = (most > best) | (chosen == 2147483647)
            best = tl.where(better, most, best)
            chosen = tl.where(better, first, chosen)
    at = row * tl.num_programs(1) + part
    tl.store(BEST + at, best)
    tl.store(CHOSEN + at, chosen)


@triton.jit
def _sample_best(BEST, CHOSEN, OUT, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, WIDTH)
    best = tl.load(BEST + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    chosen = tl.load(CHOSEN + row * PARTS + part, mask=part < PARTS, other=2147483647)
    most = tl.max(best, axis=0)
    tl.store(OUT + row, tl.min(tl.where(best == most, chosen, 2147483647), axis=0).to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    border: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Return int64 [m]: of `logits` [m, vocab] (float32 or float64, rows dense) the argmax with noise, lowest id first.

    `temperature` float64 [m], below 1e-5: no noise and no border. `seed` (64 bits), `position`, `sample` int64 [m] are
    the noise's counter. Ids may be chosen whose scaled logit is above `border` float64 [m], or equal to it while the id
    is not above `last` int64 [m]; -inf and vocab: all.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    assert logits.stride(1) == 1
    if rows:
        _sample_parts[(rows, parts)](
            logits, temperature, seed, position, sample, border, last, best, chosen, vocab, logits.stride(0),
            TILE=_TILE, PART=_PART, GREEDY=GREEDY_BELOW, MARGIN=GUMBEL_MAX + 1e-3, num_warps=4,
        )  # fmt: skip
        _sample_best[(rows,)](best, chosen, out, PARTS=parts, WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return out
