"""The dense reference: one sequence, arbitrary chunks, every rule of the model written out over whole tensors.

It is what the batched engine model over packed caches must equal, and the oracle of replay: `mask` runs all rows and
only narrows the decoder's windows, `compact` really leaves rows out. Slow and simple; serves no request.

Shape legend: t rows of a chunk, r rows kept for the decoder, hc streams, d hidden, D head dim, n entries.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.attention import attend
from engine.models.deepseek_v41.blocks import Block, Entered, Head, Streams, backbone
from engine.models.deepseek_v41.compressor import Compressor
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.dense_cache import DenseCache, PositionRows
from engine.models.deepseek_v41.dspark import Chooser, Dspark, Proposal, capture, greedy
from engine.models.deepseek_v41.engram_hash import NO_TOKEN, NgramHash, ngrams_of
from engine.models.deepseek_v41.indexer import block_mask, candidate_blocks, index_scores, select_top
from engine.models.deepseek_v41.moe import RowTokens
from engine.models.deepseek_v41.replay import ReplayRule
from engine.models.deepseek_v41.rope import RopeTables, Turn
from engine.models.deepseek_v41.weights import Weights


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one chunk gave, for the rows that ran through the decoder."""

    positions: torch.Tensor  # int64 [r]
    logits: torch.Tensor  # [r, vocab]
    layer_rows: int
    """Rows x layers executed: attention and feed-forward of a row in a layer count one."""


@dataclass(slots=True)
class _Chunk:
    """One chunk on its way through the layers; becomes narrower where the decoder begins."""

    cache: DenseCache
    rule: ReplayRule
    stop: int
    positions: torch.Tensor  # int64 [t]
    tokens: RowTokens
    turns: dict[str, Turn]
    selections: dict[int, torch.Tensor]  # index source -> int64 [t, k]
    candidates: torch.Tensor | None = None  # int64 [t, blocks]
    layer_rows: int = 0

    def keep(self, rows: slice) -> None:
        self.positions = self.positions[rows]
        self.tokens = self.tokens.take(rows)
        self.turns = {kind: turn.take(rows) for kind, turn in self.turns.items()}
        self.selections = {source: selected[rows] for source, selected in self.selections.items()}


class Reference:
    """The whole text model over `DenseCache`."""

    def __init__(
        self,
        config: V41Config,
        weights: Weights,
        arithmetic: Arithmetic,
        token_map: torch.Tensor | None = None,
        score_dtype: torch.dtype | None = None,
        *,
        use_candidates: bool = True,
    ) -> None:
        """`token_map` int64 [vocab]: compressed ids for Engram; `use_candidates` off makes the second level a no-op."""
        self.config = config
        self._arithmetic = arithmetic
        self._score_dtype = score_dtype
        self._use_candidates = use_candidates
        self._dtype = weights.embed.dtype
        self._rope = RopeTables(config, config.max_positions, self._dtype)
        self._head = Head(weights, config, arithmetic)
        self._blocks = backbone(weights, config, arithmetic)
        self._hash: NgramHash | None = None
        if config.engram is not None:
            assert token_map is not None
            self._hash = NgramHash(config.engram, token_map)
        self._dspark: Dspark | None = None
        if weights.dspark is not None:
            self._dspark = Dspark(weights.dspark, weights.head, config, arithmetic, self._rope)

    def new_cache(self) -> DenseCache:
        """Return the state of an empty sequence."""
        widths = {
            block.plan.index: block.compressor.pending_width
            for block in self._blocks
            if block.compressor is not None and block.compressor.pending_width
        }
        return DenseCache(self.config, widths, self._dtype)

    def forward(
        self,
        cache: DenseCache,
        start: int,
        stop: int,
        rule: ReplayRule | None = None,
        image_rows: torch.Tensor | None = None,
    ) -> ChunkResult:
        """Run the known tokens [start, stop) of a sequence; `image_rows` [t, d] stand for rows inside images."""
        rule = rule or ReplayRule()
        positions = torch.arange(start, stop)
        tokens = RowTokens(torch.tensor(cache.ids[start:stop]), torch.tensor(cache.is_image[start:stop]))
        turns = {kind: self._rope.at(kind, positions) for kind in ("window", "compress")}
        chunk = _Chunk(cache, rule, stop, positions, tokens, turns, {})
        streams = self._head.embed(tokens, image_rows)
        table_rows = self._table_rows(chunk, start)
        captures: list[torch.Tensor] = []
        for block in self._blocks:
            if block.engram is not None:
                found = block.engram.look_up(table_rows[block.plan.index])
                streams = Streams(block.engram.forward(streams.x, found, chunk.tokens.is_image), streams.pre)
            if block.plan.is_captured:
                captures.append(capture(streams))
            streams = self._layer(block, streams, chunk)
        self._observe(captures, chunk)
        cache.length = stop
        return ChunkResult(chunk.positions, self._head.logits(streams), chunk.layer_rows)

    def propose(self, cache: DenseCache, anchor: int, rule: ReplayRule, choose: Chooser = greedy) -> Proposal:
        """Draft behind `anchor`, the token at position `cache.length`, which has not run yet."""
        dspark, length = self._dspark, cache.length
        assert dspark is not None
        first = max(0, length - self.config.window, rule.first_window_row(is_decoder=True))

        def context(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys = cache.windows[self.config.num_layers + stage].read(first, length)
            return keys[None], torch.ones(1, length - first, dtype=torch.bool)

        return dspark.propose(self._head, torch.tensor([anchor]), torch.tensor([length]), context, choose)

    def _table_rows(self, chunk: _Chunk, start: int) -> dict[int, torch.Tensor]:
        """Return table rows int64 [t, columns] by engram layer."""
        engram = self.config.engram
        if engram is None or self._hash is None:
            return {}
        known = zip(chunk.cache.ids[: chunk.stop], chunk.cache.is_image[: chunk.stop], strict=True)
        ids = torch.tensor([NO_TOKEN if is_image else i for i, is_image in known])
        rows = self._hash.rows(ngrams_of(ids, start, engram.max_ngram))
        return dict(zip(engram.layers, rows, strict=True))

    def _layer(self, block: Block, streams: Streams, chunk: _Chunk) -> Streams:
        entered = block.enter(streams)
        if block.plan.owns_kv:
            self._write_entries(block, entered, chunk)
        if block.plan.index == self.config.decoder_start:
            first = chunk.rule.first_kept(int(chunk.positions[0]), chunk.stop) - int(chunk.positions[0])
            entered = entered.take(slice(first, None))
            chunk.keep(slice(first, None))
        chunk.layer_rows += len(chunk.positions)
        turn = chunk.turns[block.plan.rope]
        attended = self._attend(block, entered, chunk, turn)
        return block.leave(entered, attended, turn, chunk.tokens)

    def _write_entries(self, block: Block, entered: Entered, chunk: _Chunk) -> None:
        """Write pending rows of all rows, and the entries that rows at or above `write_from` complete."""
        cache, source, m = chunk.cache, block.plan.index, block.plan.m
        assert block.compressor is not None
        start = int(chunk.positions[0])
        first = max(start, chunk.rule.write_from) // m
        count = max(0, chunk.stop // m - first)
        inputs, which = entered.inputs, range(first, first + count)
        own = self._pool(block.compressor, cache.pending.get(source), inputs, chunk, which)
        keys: torch.Tensor | None = None
        if block.key_compressor is not None:
            keys = self._pool(block.key_compressor, cache.key_pending[source], inputs, chunk, which)
        turn = self._rope.at("compress", torch.arange(first, first + count) * m)
        entries = block.entries(own, keys, turn)
        cache.entries[source].write(first, self._arithmetic.entry_row(entries.main))
        if entries.index_keys is not None:
            cache.index_keys[source].write(first, self._arithmetic.index_row(entries.index_keys))

    @staticmethod
    def _pool(
        compressor: Compressor, pending: PositionRows | None, inputs: torch.Tensor, chunk: _Chunk, which: range
    ) -> torch.Tensor:
        """Return the latents of entries `which`."""
        start, span = int(chunk.positions[0]), compressor.tokens_read
        projected = compressor.project(inputs, chunk.positions)
        if pending is None:  # m = 1: entry j is made of row j alone
            rows = projected[which.start - start : which.stop - start]
            return compressor.pool(rows[:, None], torch.ones(len(which), 1, dtype=torch.bool))
        pending.write(start, projected)
        last = torch.arange(which.start, which.stop) * compressor.group + compressor.group - 1
        needed = last[:, None] - span + 1 + torch.arange(span)
        rows = pending.read(0, chunk.stop)
        return compressor.pool(rows[needed.clamp(min=0)], needed >= 0)

    def _attend(self, block: Block, entered: Entered, chunk: _Chunk, turn: Turn) -> torch.Tensor:
        """Write the window rows of a layer and attend: windows and selected entries in one softmax."""
        plan, cache, rule, at = block.plan, chunk.cache, chunk.rule, chunk.positions
        is_decoder = plan.index >= self.config.decoder_start
        queries = block.projections.queries(entered.inputs, turn)
        window = self._arithmetic.window_row(block.projections.window_rows(entered.inputs, turn))
        skipped = max(0, rule.first_window_row(is_decoder=is_decoder) - int(at[0]))
        cache.windows[plan.index].write(int(at[0]) + skipped, window[skipped:])
        lowest = (at - self.config.window + 1).clamp(min=rule.first_window_row(is_decoder=is_decoder))
        first = min(max(0, int(lowest.min())), chunk.stop)
        columns = torch.arange(first, chunk.stop)
        seen = (columns >= lowest[:, None]) & (columns <= at[:, None])
        keys = cache.windows[plan.index].read(first, chunk.stop)
        if plan.m:
            assert plan.kv_source is not None
            count = chunk.stop // plan.m
            chosen = self._select(block, entered, queries.latent, chunk)
            keys = torch.cat((keys, cache.entries[plan.kv_source].read(0, count)))
            seen = torch.cat((seen, chosen), 1)
        keys = keys.masked_fill(~seen.any(0)[:, None], 0.0)
        return attend(queries.heads, keys, seen, block.sink)

    def _select(self, block: Block, entered: Entered, latent: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """Return bool [t, n]: which of the source's n entries each row reads."""
        plan, turn = block.plan, chunk.turns[block.plan.rope]
        count = chunk.stop // plan.m
        visible = (chunk.positions + 1) // plan.m
        allowed = torch.arange(count) < visible[:, None]
        if plan.index_source is None:
            return allowed
        if block.indexer is not None:
            assert plan.kv_source is not None
            queries = block.indexer.queries(entered.inputs, latent, turn)
            keys = chunk.cache.index_keys[plan.kv_source].read(0, count)
            scores = index_scores(queries, keys, self._score_dtype)
            rules = self.config.candidates
            if rules is not None and plan.is_candidate_source:
                chunk.candidates = candidate_blocks(scores, visible, rules.block_size, rules.top_blocks)
            if rules is not None and plan.uses_candidates and self._use_candidates:
                assert chunk.candidates is not None
                allowed = allowed & block_mask(chunk.candidates, rules.block_size, count)
            chunk.selections[plan.index] = select_top(scores, allowed, self.config.index.top_k)
        selected = chunk.selections[plan.index_source]
        mask = torch.zeros(len(selected), count + 1, dtype=torch.bool)
        return mask.scatter_(1, selected.masked_fill(selected < 0, count), 1)[:, :count]

    def _observe(self, captures: list[torch.Tensor], chunk: _Chunk) -> None:
        """Write the draft context of the rows that ran with a window of their own."""
        if self._dspark is None:
            return
        at = chunk.positions
        skipped = max(0, chunk.rule.first_window_row(is_decoder=True) - int(at[0]))
        if skipped >= len(at):
            return
        rows = self._arithmetic.window_row(self._dspark.context(torch.cat(captures, 1)[skipped:], at[skipped:]))
        for stage, keys in enumerate(rows):
            chunk.cache.windows[self.config.num_layers + stage].write(int(at[skipped]), keys)
