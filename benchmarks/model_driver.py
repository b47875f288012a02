"""Feeds token chunks straight to a model's forward, without engine, scheduler or sampler: for measurements and checks."""

from dataclasses import replace

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.cache.kv_memory import KVMemory, anonymous_buffers
from engine.models.model import Model


class ModelDriver:
    """Rows of one model over KV memory of its own; every row owns pages scattered over the pool (page 0 is the sink)."""

    def __init__(
        self,
        model: Model,
        num_rows: int = 4,
        max_tokens: int = 256,
        page_tokens: int = 8,
        *,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.deterministic = deterministic
        per_row = -(-max_tokens // page_tokens)
        layout = model.kv_layout(1 + num_rows * per_row, num_rows, page_tokens)
        self.kv = KVMemory(layout, anonymous_buffers(layout))
        order = np.random.default_rng(7).permutation(num_rows * per_row) + 1
        self.tables = order.reshape(num_rows, per_row)
        self.lengths = [0] * num_rows
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]

    def batch(self, chunks: dict[int, list[int]]) -> ForwardBatch:
        """Return the batch that computes the next tokens of each row; samples after each row's last token."""
        rows, size = list(chunks), self.page_tokens
        q_len = np.array([len(chunks[r]) for r in rows], np.int64)
        q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
        starts = np.array([self.lengths[r] for r in rows], np.int64)
        positions = np.repeat(starts - q_start[:-1], q_len) + np.arange(q_start[-1])
        row_of = np.repeat(np.array(rows, np.int64), q_len)
        slots = self.tables[row_of, positions // size] * size + positions % size
        used = -(-(starts + q_len) // size)
        table = np.zeros((len(rows), int(used.max(initial=0))), np.int64)
        for i, r in enumerate(rows):
            table[i, : used[i]] = self.tables[r, : used[i]]
        return ForwardBatch(
            token_ids=torch.tensor([t for r in rows for t in chunks[r]], dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            page_table=torch.from_numpy(table),
            rows=np.array(rows, np.int32),
            q_start=q_start,
            seq_start=starts.astype(np.int32),
            sample_at=torch.from_numpy(q_start[1:].astype(np.int64) - 1),
            page_tokens=size,
            deterministic=self.deterministic,
            history=self._history(rows),
        )

    def _history(self, rows: list[int]) -> torch.Tensor | None:
        """Return the ids before each chunk, for models that look back."""
        width = self.model.facts.history_tokens
        if not width:
            return None
        found = [([-1] * width + self._tokens[r][: self.lengths[r]])[-width:] for r in rows]
        return torch.tensor(found, dtype=torch.int64)

    def step(self, chunks: dict[int, list[int]]) -> torch.Tensor:
        """Run one step: row -> its next tokens. Returns logits [rows, vocab] after each row's last token."""
        return self._run(self.batch(chunks), chunks)

    def every_logit(self, chunks: dict[int, list[int]]) -> torch.Tensor:
        """Run one step and return logits [tokens, vocab] after every query token."""
        batch = self.batch(chunks)
        return self._run(replace(batch, sample_at=torch.arange(len(batch.token_ids))), chunks)

    def _run(self, batch: ForwardBatch, chunks: dict[int, list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv)
        for row, tokens in chunks.items():
            self._tokens[row][self.lengths[row] :] = tokens
            self.lengths[row] += len(tokens)
        return logits

    def greedy(self, row: int, prompt: list[int], count: int) -> list[int]:
        """Prefill `prompt` at once, then decode `count` tokens at temperature 0."""
        out = [int(self.step({row: prompt})[0].argmax())]
        while len(out) < count:
            out.append(int(self.step({row: [out[-1]]})[0].argmax()))
        return out
