"""The draft model: a few window-only stages over the target's captured streams propose a block of tokens at once.

Committed target rows become context: one key row per stage, no queries. A proposal runs the anchor (the last committed
token, which the target has not seen yet) and noise tokens behind it through the stages; inside the block attention
looks both ways. Tokens are then chosen one after the other, each correcting the next one's logits through a low-rank
table. Knows no cache: context keys come as tensors.

Shape legend: b proposals, k block size, t rows, n context rows, d hidden, V vocabulary, S stages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.attention import attend
from engine.models.deepseek_v41.blocks import Block, Head, Streams
from engine.models.deepseek_v41.config import DsparkConfig, V41Config
from engine.models.deepseek_v41.moe import RowTokens
from engine.models.deepseek_v41.norm import rms
from engine.models.deepseek_v41.rope import RopeTables, Turn
from engine.models.deepseek_v41.weights import DsparkWeights

Chooser = Callable[[int, torch.Tensor], torch.Tensor]
"""(number i in the block, logits [b, V]) -> int64 [b]: how draft tokens are chosen."""
ContextKeys = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""stage -> keys [b, n, D] of the context and bool [b, n] which of them exist."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the draft model thinks comes after the anchors."""

    tokens: torch.Tensor  # int64 [b, k]
    confidences: torch.Tensor  # [b, k] chance of each draft to be accepted if those before it are
    logits: torch.Tensor  # [b, k, V] that the tokens were chosen from


def greedy(_: int, logits: torch.Tensor) -> torch.Tensor:
    """Choose the most likely token; the lowest id of equal ones."""
    return logits.argmax(1)


def capture(streams: Streams) -> torch.Tensor:
    """Return [t, d]: what the draft model keeps of the streams that enter one of its target layers."""
    return streams.x.mean(1)


class Dspark:
    """Stages, Markov head and confidence head."""

    def __init__(
        self, weights: DsparkWeights, head: torch.Tensor, config: V41Config, arithmetic: Arithmetic, rope: RopeTables
    ) -> None:
        """`head` [V, d] is the target's."""
        assert config.dspark is not None
        self.config: DsparkConfig = config.dspark
        self.stages = tuple(
            Block(layer, plan, config, arithmetic, config.dspark.top_k)
            for layer, plan in zip(weights.stages, config.stages, strict=True)
        )
        self._weights = weights
        self._head_weight = head
        self._eps = config.norm_eps
        self._arithmetic = arithmetic
        self._rope = rope

    def context(self, captures: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the context keys [S, t, D] of target rows, before the cache format.

        `captures` [t, targets * d]: `capture` of every target layer, side by side; `positions` int64 [t].
        """
        weights = self._weights
        rows = rms(self._arithmetic.quantized_linear(captures, weights.main_proj), weights.main_norm, self._eps)
        turn = self._rope.at("window", positions)
        return torch.stack([stage.projections.window_rows(rows, turn) for stage in self.stages])

    def propose(
        self,
        head: Head,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        context: ContextKeys,
        choose: Chooser = greedy,
    ) -> Proposal:
        """Draft k tokens after each of `anchors` int64 [b], which stand at `positions` int64 [b]."""
        size = self.config.block_size
        ids = anchors[:, None].repeat(1, size)
        ids[:, 1:] = self.config.noise_token_id
        places = positions[:, None] + torch.arange(size, device=positions.device)
        # Draft rows are text to the gate even if the vocabulary's noise token were the image token.
        tokens = RowTokens(ids.flatten())
        turn = self._rope.at("window", places.flatten())
        streams = head.embed(tokens)
        for number, stage in enumerate(self.stages):
            streams = self._stage(stage, streams, tokens, turn, context(number))
        rows = streams_of_block(streams, size)
        return self._choose_block(anchors, rows, choose)

    def _stage(
        self,
        stage: Block,
        streams: Streams,
        tokens: RowTokens,
        turn: Turn,
        context: tuple[torch.Tensor, torch.Tensor],
    ) -> Streams:
        size = self.config.block_size
        entered = stage.enter(streams)
        queries = stage.projections.queries(entered.inputs, turn).heads
        own = self._arithmetic.window_row(stage.projections.window_rows(entered.inputs, turn)).unflatten(0, (-1, size))
        keys, exists = context
        keys = torch.cat((keys, own), 1).repeat_interleave(size, 0)
        valid = torch.cat((exists, exists.new_ones(exists.shape[0], size)), 1).repeat_interleave(size, 0)
        return stage.leave(entered, attend(queries, keys, valid, stage.sink), turn, tokens)

    def _choose_block(self, anchors: torch.Tensor, rows: torch.Tensor, choose: Chooser) -> Proposal:
        weights = self._weights
        base = self._arithmetic.linear(rms(rows, weights.norm, self._eps).flatten(0, 1), self._head_weight)
        base = base.unflatten(0, rows.shape[:2])
        before, tokens, logits, confidences = anchors, list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for i in range(self.config.block_size):
            state = weights.markov_embed[before]
            own = base[:, i] + self._arithmetic.linear(state, weights.markov_head)
            # Confidence must not depend on the token it is about: it reads the un-normed row and the token before.
            certain = (torch.cat((rows[:, i], state), 1) * weights.confidence).sum(1)
            before = choose(i, own)
            tokens.append(before)
            logits.append(own)
            confidences.append(torch.sigmoid(certain))
        return Proposal(torch.stack(tokens, 1), torch.stack(confidences, 1), torch.stack(logits, 1))


def streams_of_block(streams: Streams, size: int) -> torch.Tensor:
    """Return the collapsed rows [b, k, d] of a block's last streams [b k, hc, d]."""
    return (streams.pre[:, :, None] * streams.x).sum(1).unflatten(0, (-1, size))
