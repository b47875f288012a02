"""Stand-ins around a model under test: KV tensors over plain torch memory, and a driver that builds forward batches."""

from dataclasses import dataclass, field

import numpy as np
import torch

from core.kv import ComponentKind, KVLayout
from engine.batch import ForwardBatch

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "u8": torch.uint8}


class PlainKV:
    """`KVTensors` over zeroed memory of its own, in the record shapes of `engine.cache.kv_memory`."""

    def __init__(self, layout: KVLayout, fill: float = 0) -> None:
        self.layout = layout
        self._tensors = {}
        for c in layout.components:
            shape = (c.num_records, len(c.layers), 2, c.heads, c.capacity_tokens, c.head_dim)
            self._tensors[c.name] = torch.full(shape, fill, dtype=DTYPES[c.elem])

    def paged(self, component: str) -> torch.Tensor:
        assert self.layout.component(component).kind is ComponentKind.PAGED
        return self._tensors[component]

    def per_row(self, component: str) -> torch.Tensor:
        assert self.layout.component(component).kind is not ComponentKind.PAGED
        return self._tensors[component]


@dataclass
class Driver:
    """Feeds token chunks of several rows to one model; every row gets scattered pages of its own."""

    model: object
    num_rows: int = 4
    max_tokens: int = 256
    page_tokens: int = 8
    deterministic: bool = False
    fill: float = 0
    kv: PlainKV = field(init=False)

    def __post_init__(self) -> None:
        per_row = -(-self.max_tokens // self.page_tokens)
        layout = self.model.kv_layout(1 + self.num_rows * per_row, self.num_rows, self.page_tokens)
        self.kv = PlainKV(layout, self.fill)
        order = np.random.default_rng(7).permutation(self.num_rows * per_row) + 1
        self.tables = order.reshape(self.num_rows, per_row)
        self.lengths = [0] * self.num_rows

    def step(self, chunks: dict[int, list[int]]) -> torch.Tensor:
        """Run one step: row -> its next tokens. Returns logits [rows, vocab] after each row's last token."""
        rows = list(chunks)
        q_len = [len(chunks[r]) for r in rows]
        q_start = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
        starts = np.array([self.lengths[r] for r in rows], np.int32)
        ids = [t for r in rows for t in chunks[r]]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, q_len, strict=True)] or [[]])
        positions = positions.astype(np.int64)
        row_of = np.repeat(np.array(rows, np.int64), q_len)
        slots = self.tables[row_of, positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens
        used = -(-(starts + np.array(q_len, np.int32)) // self.page_tokens)
        width = int(used.max(initial=0))
        table = np.zeros((len(rows), width), np.int64)
        for i, r in enumerate(rows):
            table[i, : used[i]] = self.tables[r, : used[i]]
        batch = ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots.astype(np.int64)),
            page_table=torch.from_numpy(table),
            rows=np.array(rows, np.int32),
            q_start=q_start,
            seq_start=starts,
            sample_at=torch.from_numpy(q_start[1:].astype(np.int64) - 1),
            page_tokens=self.page_tokens,
            deterministic=self.deterministic,
        )
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv)
        for r, n in zip(rows, q_len, strict=True):
            self.lengths[r] += n
        return logits

    def greedy(self, row: int, prompt: list[int], count: int) -> list[int]:
        """Prefill `prompt` at once, then decode `count` tokens at temperature 0."""
        out = [int(self.step({row: prompt})[0].argmax())]
        while len(out) < count:
            out.append(int(self.step({row: [out[-1]]})[0].argmax()))
        return out
