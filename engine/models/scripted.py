"""The `scripted` model: a language model whose only weights are a rule, for tests and demonstrations of the serving path.

Every query token writes its id (key) and its position (value) into its page slot; the next token is decided only from
what is read back through the page table. It is the oracle for KV corruption: see `engine.models.script`.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from core.errors import CheckpointError
from core.kv import ComponentKind, KVLayout
from engine.batch import ForwardBatch
from engine.device import CPU
from engine.models.components import token_component
from engine.models.manifest import Manifest
from engine.models.model import KVTensors, ModelFacts
from engine.models.script import NextToken, ScriptedConfig, context_hash

FIRST_LOGIT = 40.0
SECOND_LOGIT = 20.0
"""The rule's first and second choice: sampling at temperature 1 picks another token once in 5e8."""


class ScriptedModel:
    """Implements `engine.models.model.Model` without arithmetic on weights."""

    device = CPU

    def __init__(self, config: ScriptedConfig, facts: ModelFacts) -> None:
        self.facts = facts
        self._config = config
        self._rule = NextToken(config)

    def kv_layout(self, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
        """One paged component named ``full``: int64 ids and positions, `kv_lanes` times each."""
        del num_rows  # nothing is kept per row
        full = token_component(
            "full",
            ComponentKind.PAGED,
            region=0,
            layers=("0",),
            heads=1,
            head_dim=self._config.kv_lanes,
            elem="i64",
            capacity_tokens=page_tokens,
            num_records=num_pages,
        )
        return KVLayout(page_tokens=page_tokens, components=(full,))

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write ids and positions of all query tokens; return float32 [m, vocab] with two raised logits a row."""
        pages = kv.paged("full")[:, 0, :, 0]  # [num_pages, 2, page_tokens, lanes]
        page, offset = batch.slots // batch.page_tokens, batch.slots % batch.page_tokens
        pages[page, 0, offset] = batch.token_ids[:, None]
        pages[page, 1, offset] = batch.positions[:, None]
        self._compute(len(batch.token_ids))
        logits = torch.zeros(len(batch.sample_at), self._config.vocab_size)
        rows = np.searchsorted(batch.q_start, batch.sample_at.numpy(), side="right") - 1
        for i, at in enumerate(batch.sample_at.tolist()):
            length = int(batch.positions[at]) + 1
            first, second = self._next(pages, batch.page_table[int(rows[i])], length)
            logits[i, first] = FIRST_LOGIT
            logits[i, second] = SECOND_LOGIT
        return logits

    def _next(self, pages: torch.Tensor, table: torch.Tensor, length: int) -> tuple[int, int]:
        page_tokens = pages.shape[2]
        read = pages[table[: -(-length // page_tokens)]].numpy()  # [n, 2, page_tokens, lanes]
        lanes = read.shape[-1]
        tokens = read[:, 0].reshape(-1, lanes)[:length]
        positions = read[:, 1].reshape(-1, lanes)[:length]
        tail = tokens[max(0, length - self._rule.tail_tokens) :, 0]
        return self._rule.choose(tail.tolist(), context_hash(tokens, positions))

    def _compute(self, num_tokens: int) -> None:
        seconds = self._config.step_delay_ms * 1e-3 + self._config.token_delay_us * 1e-6 * num_tokens
        if num_tokens and seconds > 0:
            time.sleep(seconds)


def load(directory: Path, config: dict[str, Any], manifest: Manifest, name: str, dtype: str | None) -> ScriptedModel:
    """Build the model from its parsed config.json; called by the registry. There is nothing to cast: `dtype` is ignored."""
    del dtype
    try:
        parsed = msgspec.convert(config, ScriptedConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{directory / 'config.json'} is wrong: {error}") from error
    facts = ModelFacts(
        name=name,
        revision=manifest.revision,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=parsed.vocab_size,
        max_positions=parsed.max_position_embeddings,
        eos_token_ids=(parsed.eos_token_id,),
        kv_dtype="i64",
    )
    return ScriptedModel(parsed, facts)
