"""The n-grams of a batch's tokens, over the borders of chunks. Knows no hash."""

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.models.deepseek_v41.engram_hash import NO_TOKEN


def batch_ngrams(batch: ForwardBatch, length: int, image_token: int | None) -> torch.Tensor:
    """Return int64 [t, length] for `NgramHash.rows`: every token, then older ones of its sequence.

    `batch.history` must hold the length - 1 tokens before each chunk. Image tokens read as `NO_TOKEN`.
    """
    assert batch.history is not None
    assert batch.history.shape == (batch.num_rows, length - 1)
    q_start = batch.q_start.astype(np.int64)
    owner = np.repeat(np.arange(batch.num_rows), np.diff(q_start))
    # One line: of every sequence its history, then its tokens.
    at = np.arange(len(owner)) + (length - 1) * (owner + 1)
    line = np.empty(len(owner) + batch.history.numel(), np.int64)
    line[at] = batch.token_ids.numpy()
    begins = q_start[:-1, None] + (length - 1) * np.arange(batch.num_rows)[:, None] + np.arange(length - 1)
    line[begins] = batch.history.numpy()
    if image_token is not None:
        line[line == image_token] = NO_TOKEN
    return torch.from_numpy(line[at[:, None] - np.arange(length)])
