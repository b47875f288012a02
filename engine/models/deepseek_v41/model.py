"""DeepSeek-V4.1 (and V4) as the engine runs it: batches of chunks, decode and verify rows over packed caches.

The same blocks as the dense reference; what differs is where keys lie. With decoder replay, rows whose windows nobody
will read leave the model where the decoder begins: a prompt's last K known tokens alone go on. Stateless but for its
weights and a count of executed rows; used by one executor thread.

Shape legend: t tokens of the batch, s padded rows of a run of layers, hc streams, d hidden, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch

from engine.batch import ForwardBatch, ImageRows
from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.blocks import Block, Entered, Head, Streams, backbone
from engine.models.deepseek_v41.caches import Caches
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.draft import PagedDrafter
from engine.models.deepseek_v41.dspark import Dspark, capture
from engine.models.deepseek_v41.engram_hash import NgramHash
from engine.models.deepseek_v41.indexer import IndexQueries
from engine.models.deepseek_v41.mhc import Coefficients
from engine.models.deepseek_v41.ngrams import batch_ngrams
from engine.models.deepseek_v41.packed_model import PackedModel
from engine.models.deepseek_v41.paged_attention import Context
from engine.models.deepseek_v41.rope import RopeTables
from engine.models.deepseek_v41.step import DecoderReplay, Step
from engine.models.deepseek_v41.tiles import Tiles
from engine.models.deepseek_v41.weights import Weights
from engine.models.drafter import Captures
from engine.models.model import ImageEncoder, KVTensors, ModelFacts


@dataclass(frozen=True, slots=True)
class Kernels:
    """One set of blocks: their weights with one arithmetic."""

    blocks: tuple[Block, ...]
    head: Head
    tiles: Tiles


class DeepseekModel(PackedModel):
    """Implements `engine.models.model.Model`."""

    def __init__(
        self,
        config: V41Config,
        weights: Weights,
        facts: ModelFacts,
        arithmetic: Arithmetic,
        *,
        token_map: torch.Tensor | None = None,
        replay: DecoderReplay | None = None,
        image_encoder: ImageEncoder | None = None,
    ) -> None:
        """`token_map` int64 [vocab]: compressed ids, for models with Engram. Raises `ConfigError`."""
        self._dtype = weights.embed.dtype
        elem = "f64" if self._dtype is torch.float64 else "f32"
        super().__init__(config, facts, weights.embed.device, elem, replay=replay, image_encoder=image_encoder)
        self._weights, self._arithmetic = weights, arithmetic
        self._rope = RopeTables(config, config.max_positions, self._dtype)
        self._kernels = {fixed: _kernels(weights, config, arithmetic, fixed=fixed) for fixed in (False, True)}
        self._hash: NgramHash | None = None
        if config.engram is not None:
            assert token_map is not None
            self._hash = NgramHash(config.engram, token_map)

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write KV of all query tokens, return logits [m, V] for `batch.sample_at`."""
        return self._run(batch, kv)[0]

    def _run(self, batch: ForwardBatch, kv: KVTensors) -> tuple[torch.Tensor, Captures]:
        """Return logits, and the captures of every row that ran with a decoder window of its own."""
        if not len(batch.token_ids):
            return self._nothing()
        kernels = self._kernels[batch.deterministic]
        caches = Caches(self.cache_map(batch.page_tokens), kv, self._dtype)
        step = Step(self.config, self.replay, batch, caches=caches, tiles=kernels.tiles, rope=self._rope)
        streams = self._embed(kernels, step, batch.images)
        found = self._table_rows(batch, step)
        captures: list[torch.Tensor] = []
        for block in kernels.blocks:
            if block.engram is not None:
                streams = _recall(block, streams, found[block.plan.index], step)
            if block.plan.is_captured:
                captures.append(capture(streams))
            after = self._layer(block, streams, step)
            if after is None:
                return self._nothing()
            streams = after
        return self._logits(kernels, streams, step), self._captures(captures, step)

    def _layer(self, block: Block, streams: Streams, step: Step) -> Streams | None:
        """Return the streams behind a layer, or None if no row is left."""
        entered = _enter(block, streams, step)
        plan = block.plan
        if plan.owns_kv:
            step.writer.write(block, entered.inputs, step.entry_plan(plan))
        if plan.index == self.config.decoder_start:
            kept = step.enter_decoder()
            if kept is not None:
                if not len(kept):
                    return None
                entered = entered.take(kept)
        self.executed_rows[plan.index] += step.rows.num
        return _attend(block, entered, step)

    def _embed(self, kernels: Kernels, step: Step, images: ImageRows | None) -> Streams:
        def tile(rows: slice) -> tuple[torch.Tensor, ...]:
            streams = kernels.head.embed(step.tokens.take(rows))
            return streams.x, streams.pre

        x, pre = kernels.tiles.run(step.rows.size, tile)
        if images is not None:
            # All of the batch's tokens are there, in its order.
            x[images.at] = images.rows[:, None]
        return Streams(x, pre)

    def _table_rows(self, batch: ForwardBatch, step: Step) -> dict[int, torch.Tensor]:
        """Return table rows int64 [s, columns] by engram layer."""
        engram = self.config.engram
        if engram is None or self._hash is None:
            return {}
        ngrams = batch_ngrams(batch, engram.max_ngram, self.config.image_token_id)
        return dict(zip(engram.layers, self._hash.rows(ngrams[step.rows.at]), strict=True))

    def _logits(self, kernels: Kernels, streams: Streams, step: Step) -> torch.Tensor:
        wanted = step.sampled()
        count = len(wanted)
        if not count:
            return self._nothing()[0]
        padded = torch.zeros(kernels.tiles.padded(count), dtype=torch.int64)
        padded[:count] = wanted
        last = streams.take(padded)
        (logits,) = kernels.tiles.run(len(padded), lambda rows: (kernels.head.logits(last.take(rows)),))
        return logits[:count]

    def _captures(self, captures: list[torch.Tensor], step: Step) -> Captures:
        if not captures:
            return self._nothing()[1]
        inside = step.in_decoder_window()
        return Captures(step.rows.at[inside], torch.cat(captures, 1)[inside])

    def _nothing(self) -> tuple[torch.Tensor, Captures]:
        width = len(self.config.dspark.target_layers) * self.config.hidden_size if self.config.dspark else 0
        logits = torch.zeros(0, self.config.vocab_size, dtype=self._dtype)
        return logits, Captures(torch.zeros(0, dtype=torch.int64), torch.zeros(0, width, dtype=self._dtype))


class DraftingDeepseekModel(DeepseekModel):
    """A model that comes with DSpark: `engine.models.drafter.SpeculativeModel`."""

    @property
    def num_drafts(self) -> int:
        """Tokens that its drafter proposes at a time."""
        assert self.config.dspark is not None
        return self.config.dspark.block_size

    def drafter(self, kv: KVTensors) -> PagedDrafter:
        """Return the drafter over the KV memory that `forward_captured` is called with."""
        weights = self._weights
        assert weights.dspark is not None
        dspark = Dspark(weights.dspark, weights.head, self.config, self._arithmetic, self._rope)
        caches = Caches(self.cache_map(kv.layout.page_tokens), kv, self._dtype)
        return PagedDrafter(dspark, self._kernels[False].head, caches, self.config)

    def forward_captured(self, batch: ForwardBatch, kv: KVTensors) -> tuple[torch.Tensor, Captures]:
        """As `forward`, and what the drafter observes: of every row that ran with a decoder window of its own."""
        return self._run(batch, kv)


def _enter(block: Block, streams: Streams, step: Step) -> Entered:
    def tile(rows: slice) -> tuple[torch.Tensor, ...]:
        entered = block.enter(streams.take(rows))
        return entered.mix.pre, entered.mix.post, entered.mix.comb, entered.inputs

    pre, post, comb, inputs = step.tiles.run(step.rows.size, tile)
    return Entered(streams.x, Coefficients(pre, post, comb), inputs)


def _recall(block: Block, streams: Streams, table_rows: torch.Tensor, step: Step) -> Streams:
    """Apply a layer's n-gram memory."""
    engram, is_image = block.engram, step.tokens.is_image
    assert engram is not None

    def tile(rows: slice) -> tuple[torch.Tensor, ...]:
        found = engram.look_up(table_rows[rows])
        return (engram.forward(streams.x[rows], found, None if is_image is None else is_image[rows]),)

    return Streams(step.tiles.run(step.rows.size, tile)[0], streams.pre)


def _attend(block: Block, entered: Entered, step: Step) -> Streams:
    """Run a layer from its attention on."""
    turn, indexer = step.turn(block.plan), block.indexer

    def ask(rows: slice) -> tuple[torch.Tensor, ...]:
        inputs, own = entered.inputs[rows], turn.take(rows)
        queries = block.projections.queries(inputs, own)
        window = block.projections.window_rows(inputs, own)
        if indexer is None:
            return queries.heads, window
        index = indexer.queries(inputs, queries.latent, own)
        return queries.heads, window, index.heads, index.weights

    size, attention = step.rows.size, step.attention
    heads, window, *index = step.tiles.run(size, ask)
    selection = step.select(block.plan, IndexQueries(*index) if index else None)
    context = Context(attention.store_window(block.plan.index, window), block.plan.kv_source, selection)

    def leave(rows: slice) -> tuple[torch.Tensor, ...]:
        attended = attention.attend(block, context, heads[rows], rows)
        left = block.leave(entered.take(rows), attended, turn.take(rows), step.tokens.take(rows))
        return left.x, left.pre

    return Streams(*step.tiles.run(size, leave))


def _kernels(weights: Weights, config: V41Config, arithmetic: Arithmetic, *, fixed: bool) -> Kernels:
    own = replace(arithmetic, fixed_shapes=fixed)
    return Kernels(backbone(weights, config, own), Head(weights, config, own), Tiles(fixed=fixed))
