"""Feeds chunks straight to the batched DeepSeek model, over poisoned KV memory and pages in random order.

Beside it the dense reference of the same weights: `Truth` runs one sequence and tells what every row should give.
"""

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.batch import ForwardBatch, RowReplay
from engine.cache.kv_memory import KVMemory, anonymous_buffers
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.model import DraftingDeepseekModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.reference import Reference
from engine.models.deepseek_v41.replay import ReplayRule
from engine.models.deepseek_v41.step import DecoderReplay
from engine.models.drafter import SpeculativeModel
from engine.models.model import ModelFacts

torch.set_num_threads(1)
PAGE = 8
FACTS = ModelFacts(
    name="v41-tiny",
    revision="0",
    tokenizer_digest="0",
    vocab_size=512,
    max_positions=1024,
    eos_token_ids=(1,),
    kv_dtype="f64",
    history_tokens=3,
)


@functools.cache
def tiny_weights(dtype):
    config = parse_config(tiny_config(max_positions=1024))
    return config, random_weights(config, 3, dtype)


def token_map(config):
    return torch.arange(config.vocab_size) % config.engram.compressed_vocab_size


def tiny_model(dtype=torch.float64, mode="off", keep=20):
    config, weights = tiny_weights(dtype)
    return DraftingDeepseekModel(
        config,
        weights,
        FACTS,
        arithmetic_of(config),
        token_map=token_map(config),
        replay=DecoderReplay(mode=mode, keep=keep),
    )


def reference(dtype=torch.float64, **switches):
    config, weights = tiny_weights(dtype)
    return Reference(config, weights, arithmetic_of(config, **switches), token_map(config))


def text(seed, length):
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


class Truth:
    """One sequence through the dense reference."""

    def __init__(self, model, rule=None):
        self.model, self.rule, self.cache = model, rule or ReplayRule(), model.new_cache()

    def run(self, tokens, start=None):
        """Run the next tokens; returns logits of the rows that ran through the decoder."""
        start = self.cache.length if start is None else start
        if not self.cache.ids and start:
            raise AssertionError("tell the tokens before `start` first")
        self.cache.extend(tokens)
        with torch.inference_mode():
            return self.model.forward(self.cache, start, start + len(tokens), self.rule).logits


@dataclass
class Row:
    """What the driver knows of one engine row."""

    ids: list = field(default_factory=list)
    length: int = 0
    floor: int = 0
    known: int = 0
    write_from: int = 0


class Driver:
    """Engine rows over one KV memory; every byte is poison until the model writes it."""

    def __init__(self, model, num_rows=4, max_tokens=160, *, deterministic=False, seed=0, page_tokens=PAGE):
        self.model, self.deterministic, self.page_tokens = model, deterministic, page_tokens
        self.per_row = -(-max_tokens // page_tokens)
        self.layout = model.kv_layout(1 + num_rows * self.per_row, num_rows, page_tokens)
        self.buffers = anonymous_buffers(self.layout)
        for buffer in self.buffers:
            np.frombuffer(buffer, np.uint8)[:] = 0xFF
        self.kv = KVMemory(self.layout, self.buffers)
        order = np.random.default_rng(seed).permutation(num_rows * self.per_row) + 1
        self.tables = order.reshape(num_rows, self.per_row)
        self.rows = [Row() for _ in range(num_rows)]

    def restart(self, row, ids=(), length=0, **floors):
        """Give a row to a new sequence of which `length` tokens are cached already."""
        self.rows[row] = Row(list(ids), length, **floors)

    def batch(self, chunks):
        rows, size = list(chunks), self.page_tokens
        states = [self.rows[r] for r in rows]
        lengths = np.array([len(chunks[r]) for r in rows])
        q_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        starts = np.array([s.length for s in states])
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(owner)) - q_start[owner] + starts[owner]
        tables = self.tables[rows]
        used = -(-(starts + lengths) // size)
        table = np.zeros((len(rows), int(used.max(initial=0))), np.int64)
        for i in range(len(rows)):
            table[i, : used[i]] = tables[i, : used[i]]
        history = [([-1, -1, -1] + s.ids[: s.length])[-3:] for s in states]
        return ForwardBatch(
            token_ids=torch.tensor([t for r in rows for t in chunks[r]], dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(tables[owner, positions // size] * size + positions % size),
            page_table=torch.from_numpy(table),
            rows=np.array(rows, np.int32),
            q_start=q_start,
            seq_start=starts.astype(np.int32),
            sample_at=torch.arange(len(owner)),
            page_tokens=size,
            deterministic=self.deterministic,
            history=torch.tensor(history, dtype=torch.int64),
            replay=RowReplay(
                *(np.array([getattr(s, n) for s in states], np.int32) for n in ("floor", "known", "write_from"))
            ),
        )

    def step(self, chunks, wanted=None):
        """Run one step: row -> next tokens. Returns row -> logits of all its tokens, or of the last `wanted[row]`."""
        batch = self.batch(chunks)
        ends = batch.q_start[1:]
        counts = {r: len(c) if wanted is None else wanted[r] for r, c in chunks.items()}
        at = [np.arange(end - counts[r], end) for r, end in zip(chunks, ends, strict=True)]
        batch = replace(batch, sample_at=torch.from_numpy(np.concatenate(at).astype(np.int64)))
        with torch.inference_mode():
            if isinstance(self.model, SpeculativeModel):
                logits, captures = self.model.forward_captured(batch, self.kv)
            else:
                logits, captures = self.model.forward(batch, self.kv), None
        self.last = batch, captures
        for row, tokens in chunks.items():
            state = self.rows[row]
            state.ids = state.ids[: state.length] + list(tokens)
            state.length += len(tokens)
        return dict(zip(chunks, logits.split([counts[r] for r in chunks]), strict=True))

    def rewind(self, row, length):
        self.rows[row].length = length
