"""Attention over paged KV in plain torch: writes the step's keys and values to their slots, then attends causally.

One `PagedAttention` serves all layers of one step; its index tensors and masks are made once. Chunks run one by one;
decode rows run together, grouped by length. Deterministic mode runs token by token in page order instead. Knows page
tables and positions, no sequences.

Shape legend: t query tokens, h heads, k kv heads, g = h / k, d head_dim, p page_tokens, n keys, b rows of a group.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.attention.token import attend_token
from engine.batch import ForwardBatch

_GROUP_BYTES = 4 << 20
"""Most bytes of keys (and as many of values) that one group of decode rows gathers: page faults cost more beyond."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row with several query tokens."""

    begin: int
    end: int
    pages: torch.Tensor  # int64 [pages]
    length: int  # tokens in KV after this step
    mask: torch.Tensor | None  # bool [q, n]; None: the chunk starts the sequence, plain causal


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows of similar length."""

    tokens: torch.Tensor  # int64 [b] query indices
    table: torch.Tensor  # int64 [b, pages]
    bias: torch.Tensor  # [b, 1, 1, n]: 0 where visible, else -inf


class PagedAttention:
    """Attention of one step over one paged component [num_pages, layers, 2, kv_heads, page_tokens, head_dim]."""

    def __init__(self, batch: ForwardBatch, pages: torch.Tensor) -> None:
        self._batch = batch
        self._pages = pages
        self._page = batch.slots // batch.page_tokens
        self._offset = batch.slots % batch.page_tokens
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []
        if not batch.deterministic:
            q_len = np.diff(batch.q_start)
            self._chunks = [self._chunk(int(i)) for i in np.flatnonzero(q_len > 1)]
            self._groups = self._decode_groups(np.flatnonzero(q_len == 1))

    def forward(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store `key` and `value` [t, k, d] of a layer (index inside the component); return [t, h, d] for `query`."""
        pages = self._pages[:, layer]  # [num_pages, 2, k, p, d]
        pages[self._page, 0, :, self._offset] = key
        pages[self._page, 1, :, self._offset] = value
        out = torch.empty_like(query)
        if self._batch.deterministic:
            self._by_token(pages, query, out)
        for chunk in self._chunks:
            own = slice(chunk.begin, chunk.end)
            if chunk.mask is None:
                keys, values = key[own].transpose(0, 1), value[own].transpose(0, 1)
            else:
                keys, values = _gather(pages, chunk.pages, chunk.length)
            out[own] = functional.scaled_dot_product_attention(
                query[own].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
        for group in self._groups:
            out[group.tokens] = _attend_group(pages, group, query[group.tokens])
        return out

    def _by_token(self, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        batch = self._batch
        for i in range(batch.num_rows):
            begin, end, start = int(batch.q_start[i]), int(batch.q_start[i + 1]), int(batch.seq_start[i])
            length = start + end - begin
            keys, values = _gather(pages, batch.page_table[i, : -(-length // batch.page_tokens)], length)
            for at in range(begin, end):
                seen = start + at - begin + 1
                out[at] = attend_token(query[at], keys[:, :seen], values[:, :seen])

    def _chunk(self, row: int) -> _Chunk:
        batch = self._batch
        begin, end, start = int(batch.q_start[row]), int(batch.q_start[row + 1]), int(batch.seq_start[row])
        length = start + end - begin
        mask = None
        if start:
            mask = torch.ones(end - begin, length, dtype=torch.bool).tril_(start)
        used = batch.page_table[row, : -(-length // batch.page_tokens)]
        return _Chunk(begin=begin, end=end, pages=used, length=length, mask=mask)

    def _decode_groups(self, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[_Group]:
        """Sort decode rows by length and cut where padding would waste a quarter or the gather gets too big."""
        batch, size = self._batch, self._batch.page_tokens
        lengths = batch.seq_start[rows].astype(np.int64) + 1
        order = np.argsort(-lengths, kind="stable")
        rows, lengths = rows[order], lengths[order]
        counts = -(-lengths // size)
        page_bytes = self._pages[0, 0, 0].numel() * self._pages.element_size() if len(rows) else 1
        groups: list[_Group] = []
        begin = 0
        while begin < len(rows):
            widest = int(counts[begin])
            fits = max(1, _GROUP_BYTES // (widest * page_bytes))
            # A quarter of padding at most, but short rows are not worth a group of their own.
            alike = int(np.searchsorted(-counts[begin:], -min(widest * 3 // 4, widest - 4), side="right"))
            end = min(begin + fits, begin + max(1, alike))
            chosen = torch.from_numpy(rows[begin:end])
            hidden = torch.arange(widest * size) >= torch.from_numpy(lengths[begin:end])[:, None]
            bias = torch.zeros(hidden.shape, dtype=_wide(self._pages.dtype)).masked_fill_(hidden, -torch.inf)
            tokens = torch.from_numpy(batch.q_start[rows[begin:end]].astype(np.int64))
            groups.append(_Group(tokens, batch.page_table[chosen, :widest], bias[:, None, None]))
            begin = end
        return groups


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


def _gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [k, n, d] of one row in position order; `pages` [num_pages, 2, k, p, d]."""
    found = pages.index_select(0, table).permute(1, 2, 0, 3, 4)
    flat = found.reshape(2, found.shape[1], -1, found.shape[4])
    return flat[0, :, :length], flat[1, :, :length]


def _attend_group(pages: torch.Tensor, group: _Group, query: torch.Tensor) -> torch.Tensor:
    """Attend [b, h, d] over padded pages; products run page by page, so that no gathered key is moved again."""
    num_rows, num_heads, head_dim = query.shape
    num_pages, kv_heads, size = group.table.shape[1], pages.shape[2], pages.shape[3]
    # index_select copies whole pages; indexing with a tensor moves single elements and takes several times as long.
    flat, shape = group.table.reshape(-1), (num_rows, num_pages, kv_heads, size, head_dim)
    keys = pages[:, 0].index_select(0, flat).view(shape)
    values = pages[:, 1].index_select(0, flat).view(shape)
    grouped = (query * head_dim**-0.5).view(num_rows, 1, kv_heads, -1, head_dim)
    by_page = torch.matmul(grouped, keys.transpose(-1, -2))  # [b, pages, k, g, p]
    scores = by_page.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, -1, num_pages * size)
    weights = (scores + group.bias).softmax(-1).to(values.dtype)
    by_page = weights.view(num_rows, kv_heads, -1, num_pages, size).permute(0, 3, 1, 2, 4)
    return torch.matmul(by_page, values).sum(1).view(num_rows, num_heads, head_dim)
