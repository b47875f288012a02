"""The tensors of one step, passed explicitly to every layer. Built by the runner, read by models and attention."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """b rows, t query tokens. Host arrays are for control flow, tensors for arithmetic; row order is equal in all."""

    token_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t] absolute positions
    slots: torch.Tensor  # int64 [t] page * page_tokens + offset where each token's KV is written
    page_table: torch.Tensor  # int64 [b, max_pages_of_this_step]; columns past a row's pages are 0 (SINK)
    rows: npt.NDArray[np.int32]  # [b] engine rows: index of ring and state records
    q_start: npt.NDArray[np.int32]  # [b+1]
    seq_start: npt.NDArray[np.int32]  # [b] tokens in KV before this step
    sample_at: torch.Tensor  # int64 [m] indices into t whose logits are wanted, ascending
    page_tokens: int
    deterministic: bool
    """A14: linears in padded row tiles of 16, attention row by row in page order."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)
