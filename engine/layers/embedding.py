"""Token embedding. The output head of a tied model is a `Linear` over the same tensor."""

import torch
from torch.nn import functional


class Embedding:
    """Rows of `weight` [vocab, width] by token id."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [t, width] for int64 ids [t]."""
        return functional.embedding(token_ids, self._weight)
