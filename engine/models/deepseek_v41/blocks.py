"""One block (backbone layer or draft stage) around its attention: streams in, streams out, and the rows in between.

A model runs `enter`, then attention over wherever its keys lie with the block's own `projections`, `compressor`,
`indexer` and `output`, then `leave`. Between the two, rows may be dropped: all that crosses is in `Entered`. Every
method maps each row alone. Knows no cache and no positions beyond the turns it is given.

Shape legend: t rows, hc streams, d hidden.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.attention import OutputProjection, Projections
from engine.models.deepseek_v41.compressor import Compressor, IndexKey, hadamard
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.engram import Engram
from engine.models.deepseek_v41.indexer import Indexer
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.mhc import Coefficients, HeadMixer, StreamMixer, collapse, expand, first_stream
from engine.models.deepseek_v41.moe import Moe, RowTokens
from engine.models.deepseek_v41.norm import rms
from engine.models.deepseek_v41.rope import Turn, rotate
from engine.models.deepseek_v41.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Streams:
    """What passes from block to block: always both, whatever happens to the rows."""

    x: torch.Tensor  # [t, hc, d]
    pre: torch.Tensor  # [t, hc] collapse weights of the sublayer before; unused by V4

    def take(self, rows: torch.Tensor | slice) -> "Streams":
        """Return some rows."""
        return Streams(self.x[rows], self.pre[rows])


@dataclass(frozen=True, slots=True)
class Entered:
    """A block between its entry and its attention's result."""

    x: torch.Tensor  # [t, hc, d] streams as they entered
    mix: Coefficients
    inputs: torch.Tensor  # [t, d] collapsed, normalised: what attention and compressor read

    def take(self, rows: torch.Tensor | slice) -> "Entered":
        """Return some rows: what the block goes on with when the others are done (decoder replay)."""
        return Entered(self.x[rows], self.mix.take(rows), self.inputs[rows])


@dataclass(frozen=True, slots=True)
class Entries:
    """Global entries of one owner, before any cache format."""

    main: torch.Tensor  # [n, D] rotated
    index_keys: torch.Tensor | None  # [n, index head dim] rotated; None if nobody selects among them


class Block:
    """All of one layer except where its keys lie."""

    def __init__(
        self, weights: LayerWeights, plan: LayerPlan, config: V41Config, arithmetic: Arithmetic, top_k: int
    ) -> None:
        self.plan = plan
        self.sink = weights.attn.sink
        self.projections = Projections(weights.attn, config, arithmetic)
        self.output = OutputProjection(weights.attn, config, arithmetic)
        self.engram = None if weights.engram is None else Engram(weights.engram, config.norm_eps, arithmetic)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        self.key_compressor: Compressor | None = None
        """V4: index keys are pooled by a compressor of their own, with pending rows of their own."""
        self._index_key: IndexKey | None = None
        self._hadamard = config.index.hadamard
        attn = weights.attn
        if attn.compressor is not None:
            self.compressor = Compressor(attn.compressor, plan, config, arithmetic)
        if attn.index_key is not None:
            self._index_key = IndexKey(attn.index_key, config, arithmetic)
        if attn.indexer is not None:
            self.indexer = Indexer(attn.indexer, config, arithmetic)
            if attn.indexer.compressor is not None:
                self.key_compressor = Compressor(attn.indexer.compressor, plan, config, arithmetic)
        self._attn_norm, self._ffn_norm = weights.attn_norm, weights.ffn_norm
        self._eps = config.norm_eps
        self._from_prev = config.mhc.pre_from_prev
        self._mix_attn = StreamMixer(weights.hc_attn, config.mhc, config.norm_eps, arithmetic)
        self._mix_ffn = StreamMixer(weights.hc_ffn, config.mhc, config.norm_eps, arithmetic)
        self._moe = Moe(weights.moe, config.moe, top_k, arithmetic)

    def enter(self, streams: Streams) -> Entered:
        """Mix, collapse and normalise. Engram, if the layer has it, has been applied to the streams already."""
        mix = self._mix_attn.forward(streams.x)
        collapsed = collapse(streams.x, streams.pre if self._from_prev else mix.pre)
        return Entered(streams.x, mix, rms(collapsed, self._attn_norm, self._eps))

    def entries(self, latents: torch.Tensor, key_latents: torch.Tensor | None, turn: Turn) -> Entries:
        """Return entries of pooled latents [n, D] of this layer's compressor; `turn` is of each group's first token.

        `key_latents` [n, index head dim] are those of `key_compressor`, if there is one.
        """
        keys: torch.Tensor | None = None
        if self._index_key is not None:
            keys = self._index_key.forward(latents, turn)
        elif key_latents is not None:
            keys = rotate(key_latents, turn)
        if keys is not None and self._hadamard:
            keys = hadamard(keys)
        return Entries(rotate(latents, turn), keys)

    def leave(self, entered: Entered, attended: torch.Tensor, turn: Turn, tokens: RowTokens) -> Streams:
        """Project attention's result [t, H, D], expand, and run the feed-forward sublayer."""
        x = expand(self.output.forward(attended, turn), entered.x, entered.mix)
        mix = self._mix_ffn.forward(x)
        collapsed = collapse(x, entered.mix.pre if self._from_prev else mix.pre)
        y = self._moe.forward(rms(collapsed, self._ffn_norm, self._eps), tokens)
        return Streams(expand(y, x, mix), mix.pre)


class Head:
    """From token ids to the first streams, and from the last streams to logits."""

    def __init__(self, weights: Weights, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._hc = config.mhc.mult
        self._eps = config.norm_eps
        self._arithmetic = arithmetic
        self._mixer: HeadMixer | None = None
        if weights.head_mix is not None:
            self._mixer = HeadMixer(weights.head_mix, config.mhc, config.norm_eps, arithmetic)

    def embed(self, tokens: RowTokens, image_rows: torch.Tensor | None = None) -> Streams:
        """Return the streams of t rows; `image_rows` [t, d] replace the embeddings of rows that belong to images."""
        rows = self._weights.embed[tokens.ids]
        if image_rows is not None and tokens.is_image is not None:
            rows = torch.where(tokens.is_image[:, None], image_rows, rows)
        streams = rows[:, None].repeat(1, self._hc, 1)
        return Streams(streams, first_stream(rows.shape[0], self._hc, rows))

    def collapse(self, streams: Streams) -> torch.Tensor:
        """Return the collapsed rows [t, d], not normalised."""
        pre = streams.pre if self._mixer is None else self._mixer.forward(streams.x)
        return collapse(streams.x, pre)

    def logits(self, streams: Streams) -> torch.Tensor:
        """Return [t, vocab]."""
        rows = rms(self.collapse(streams), self._weights.norm, self._eps)
        return self._arithmetic.linear(rows, self._weights.head)


def backbone(weights: Weights, config: V41Config, arithmetic: Arithmetic) -> tuple[Block, ...]:
    """Return the blocks of all backbone layers."""
    return tuple(
        Block(layer, plan, config, arithmetic, config.moe.top_k)
        for layer, plan in zip(weights.layers, config.layers, strict=True)
    )
