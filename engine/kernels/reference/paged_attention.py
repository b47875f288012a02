"""Specification of `engine.kernels.paged_attention`."""

import torch

from engine.attention.token import attend_token

_QUERIES = 512
"""Query tokens whose scores are held at a time."""


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    q_start: torch.Tensor,
    seq_start: torch.Tensor,
    max_q: int,
    splits: int,
    by_token: bool,
) -> torch.Tensor:
    """Attend causally, row by row; see the kernel for shapes. How work is split means nothing here."""
    assert splits > 0
    out = torch.zeros_like(query)
    kv_heads, size, width = pages.shape[2:]
    starts = q_start.tolist()
    for i, start in enumerate(seq_start.tolist()):
        begin, end = starts[i], starts[i + 1]
        assert end - begin <= max_q, "a row has more query tokens than the host was told"
        length = start + end - begin
        if begin == end:
            continue
        found = pages[page_table[i, : -(-length // size)].long()].permute(1, 2, 0, 3, 4)
        keys, values = found.reshape(2, kv_heads, -1, width)[:, :, :length]
        if by_token:
            for at in range(begin, end):
                seen = start + at - begin + 1
                out[at] = attend_token(query[at], keys[:, :seen], values[:, :seen])
            continue
        for first in range(begin, end, _QUERIES):
            last = min(end, first + _QUERIES)
            own = query[first:last].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [k, g, q, d]
            scores = torch.matmul(own, keys.transpose(-1, -2)[:, None])
            wide = (scores.float() if scores.dtype is torch.bfloat16 else scores) * width**-0.5
            hidden = torch.ones(last - first, length, dtype=torch.bool, device=query.device)
            wide.masked_fill_(hidden.triu_(start + first - begin + 1), -torch.inf)
            weights = wide.softmax(-1).to(values.dtype)
            out[first:last] = torch.matmul(weights, values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return out
