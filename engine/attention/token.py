"""Attention of one query token: the specification, and what deterministic mode runs (decision A14).

The work and its shapes depend on nothing but the number of visible keys: the same bits in any batch and chunking.
"""

import torch


def attend_token(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return [heads, head_dim] for one token that sees all given keys.

    `query` [heads, head_dim]; `keys`, `values` [kv_heads, n, head_dim] in position order; heads are grouped by kv head.
    Scores and softmax are in at least float32.
    """
    kv_heads, _, head_dim = keys.shape
    grouped = query.clone().view(kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2))
    wide = scores.float() if scores.dtype is torch.bfloat16 else scores
    weights = (wide * head_dim**-0.5).softmax(-1).to(values.dtype)
    return torch.matmul(weights, values).view(-1, head_dim)
