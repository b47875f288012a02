"""Steps of V4.1 straight through its model on a device, over random KV: batches as a device executor makes them."""

import numpy as np
import torch

from engine.batch import DeviceRows, ForwardBatch
from engine.cache.kv_memory import KVMemory, region_sizes
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel

PAGE = 256
_LEAST, _MOST = 112, 119
"""Bytes that are harmless as codes and as scales of every format."""


class RowsDriver:
    """b sequences that each own pages scattered over a pool (page 0 is the sink)."""

    def __init__(self, model: DeviceDeepseekModel, num_rows: int, max_tokens: int, *, random_kv: bool = False) -> None:
        self.model = model
        self.device = model.device
        self.per_row = -(-max_tokens // PAGE)
        self.layout = model.kv_layout(1 + num_rows * self.per_row, num_rows, PAGE)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=model.device) for size in region_sizes(self.layout)]
        if random_kv:
            for component in self.layout.components:
                if component.elem == "u8":
                    buffers[component.region].random_(_LEAST, _MOST)
        self.kv = KVMemory(self.layout, buffers)
        order = np.random.default_rng(7).permutation(num_rows * self.per_row) + 1
        self.tables = order.reshape(num_rows, self.per_row)

    def batch(
        self, rows: list[int], start: list[int], tokens: list[list[int]], history: list[list[int]], *,
        every: bool = False, fixed: bool = False,
    ) -> ForwardBatch:  # fmt: skip
        """Return a step: `tokens` of rows that hold `start` tokens, whose last three were `history`; `every`: all logits."""
        lengths = np.array([len(t) for t in tokens])
        q_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        begin = np.array(start)
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(owner)) - q_start[owner] + begin[owner]
        tables = self.tables[rows]
        slots = tables[owner, positions // PAGE] * PAGE + positions % PAGE
        nothing = np.zeros(0, np.int32)

        def put(values: object) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

        laid = DeviceRows(
            put(np.array(rows, np.int32)), put(q_start), put(begin.astype(np.int32)),
            int(lengths.max()), int((begin + lengths).max()),
        )  # fmt: skip
        wanted = np.arange(len(owner)) if every else q_start[1:].astype(np.int64) - 1
        return ForwardBatch(
            token_ids=put(np.concatenate(tokens).astype(np.int64)), positions=put(positions), slots=put(slots),
            page_table=put(tables.astype(np.int32)), rows=nothing, q_start=nothing, seq_start=nothing,
            sample_at=put(wanted), page_tokens=PAGE, deterministic=fixed, history=put(np.array(history, np.int64)),
            device_rows=laid,
        )  # fmt: skip

    def decoding(self, rows: int, length: int, each: int = 1, *, fixed: bool = False) -> ForwardBatch:
        """Return a step of `each` random tokens in every row behind `length` tokens; all logits."""
        rng = np.random.default_rng(rows + each)
        vocab = self.model.config.vocab_size - 2
        tokens = rng.integers(3, vocab, (rows, each)).tolist()
        history = rng.integers(3, vocab, (rows, 3)).tolist()
        return self.batch(list(range(rows)), [length] * rows, tokens, history, every=True, fixed=fixed)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a step eagerly."""
        with torch.inference_mode():
            return self.model.forward(batch, self.kv)


def captured(driver: RowsDriver, batch: ForwardBatch) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a recorded step and where its logits come out."""
    assert driver.model.graph_ready(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        driver.run(batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = driver.run(batch)
    return graph, made
