"""Sliding-window attention over one ring per row: position j lives in slot j mod capacity, capacity > window.

A chunk attends to the ring's old content and to itself, then leaves its last `window` tokens in the ring; so any
chunking gives the same result. A decode row writes first and then attends to its whole ring. Knows positions and engine
rows; no pages.

Shape legend as in `engine.attention.paged`; c ring capacity.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.attention.token import attend_token
from engine.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row with several query tokens (in deterministic mode: any row)."""

    row: int
    begin: int
    end: int
    start: int
    old_slots: torch.Tensor  # int64 [o] ring slots of the visible old positions, in position order
    mask: torch.Tensor  # bool [q, o + q]
    kept: int  # first token (index into t) that stays in the ring
    kept_slots: torch.Tensor  # int64


@dataclass(frozen=True, slots=True)
class _Decode:
    """All rows with one query token."""

    tokens: torch.Tensor  # int64 [b] query indices
    rows: torch.Tensor  # int64 [b]
    slots: torch.Tensor  # int64 [b] where the token goes
    bias: torch.Tensor  # [b, 1, 1, c]: 0 where visible, else -inf


class RingAttention:
    """Attention of one step over one ring component [num_rows, layers, 2, kv_heads, capacity, head_dim].

    A token at position i sees positions j with i - window < j <= i.
    """

    def __init__(self, batch: ForwardBatch, rings: torch.Tensor, window: int) -> None:
        self._batch = batch
        self._rings = rings
        self._window = window
        self._capacity = rings.shape[4]
        q_len = np.diff(batch.q_start)
        one_by_one = np.zeros_like(q_len, np.bool_) if batch.deterministic else q_len == 1
        self._chunks = [self._chunk(int(i)) for i in np.flatnonzero(~one_by_one & (q_len > 0))]
        self._decode = self._decode_rows(np.flatnonzero(one_by_one))

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store `key` and `value` [t, k, d] of a layer (index inside the component); return [t, h, d] for `query`."""
        rings = self._rings[:, layer]  # [num_rows, 2, k, c, d]
        out = torch.empty_like(query)
        for chunk in self._chunks:
            self._attend_chunk(rings[chunk.row], chunk, query, torch.stack((key, value)), out)
        decode = self._decode
        if len(decode.tokens):
            rings[decode.rows, 0, :, decode.slots] = key[decode.tokens]
            rings[decode.rows, 1, :, decode.slots] = value[decode.tokens]
            out[decode.tokens] = _attend_rings(rings, decode, query[decode.tokens])
        return out

    def _attend_chunk(
        self, ring: torch.Tensor, chunk: _Chunk, query: torch.Tensor, fresh: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend one chunk; `ring` [2, k, c, d] is read first and written last, `fresh` [2, t, k, d]."""
        own = slice(chunk.begin, chunk.end)
        keys, values = torch.cat((ring[:, :, chunk.old_slots], fresh[:, own].transpose(1, 2)), dim=2)
        if self._batch.deterministic:
            num_old = len(chunk.old_slots)
            for at in range(chunk.begin, chunk.end):
                end = num_old + at - chunk.begin + 1
                seen = slice(max(0, end - self._window), end)
                # Copies, so that the strides too depend on nothing but the number of keys.
                out[at] = attend_token(query[at], keys[:, seen].clone(), values[:, seen].clone())
        else:
            out[own] = functional.scaled_dot_product_attention(
                query[own].transpose(0, 1)[None], keys[None], values[None], attn_mask=chunk.mask, enable_gqa=True
            )[0].transpose(0, 1)
        ring[:, :, chunk.kept_slots] = fresh[:, chunk.kept : chunk.end].transpose(1, 2)

    def _chunk(self, i: int) -> _Chunk:
        batch, window = self._batch, self._window
        begin, end, start = int(batch.q_start[i]), int(batch.q_start[i + 1]), int(batch.seq_start[i])
        first_old = max(0, start - window + 1)
        positions = torch.arange(first_old, start + end - begin, device=self._rings.device)
        asking = positions[start - first_old :, None]
        kept = max(begin, end - window)
        return _Chunk(
            row=int(batch.rows[i]),
            begin=begin,
            end=end,
            start=start,
            old_slots=positions[: start - first_old] % self._capacity,
            mask=(positions <= asking) & (positions > asking - window),
            kept=kept,
            kept_slots=torch.arange(start + kept - begin, start + end - begin, device=self._rings.device)
            % self._capacity,
        )

    def _decode_rows(self, chosen: np.ndarray[tuple[int], np.dtype[np.intp]]) -> _Decode:
        batch, device = self._batch, self._rings.device
        positions = torch.from_numpy(batch.seq_start[chosen].astype(np.int64)).to(device)[:, None]
        # The newest position that can be in each slot; the one being written is among them.
        held = positions - (positions - torch.arange(self._capacity, device=device)) % self._capacity
        hidden = (held < 0) | (held <= positions - self._window)
        wide = torch.float32 if self._rings.dtype is torch.bfloat16 else self._rings.dtype
        return _Decode(
            tokens=torch.from_numpy(batch.q_start[chosen].astype(np.int64)).to(device),
            rows=torch.from_numpy(batch.rows[chosen].astype(np.int64)).to(device),
            slots=positions[:, 0] % self._capacity,
            bias=torch.zeros(hidden.shape, dtype=wide, device=device).masked_fill_(hidden, -torch.inf)[:, None, None],
        )


def _attend_rings(rings: torch.Tensor, decode: _Decode, query: torch.Tensor) -> torch.Tensor:
    """Attend [b, h, d] over whole rings [num_rows, 2, k, c, d]; hidden slots may hold anything finite."""
    num_rows, num_heads, head_dim = query.shape
    found = rings.index_select(0, decode.rows)
    grouped = (query * head_dim**-0.5).view(num_rows, rings.shape[2], -1, head_dim)
    scores = torch.matmul(grouped, found[:, 0].transpose(-1, -2)) + decode.bias
    weights = scores.softmax(-1).to(found.dtype)
    return torch.matmul(weights, found[:, 1]).view(num_rows, num_heads, head_dim)
