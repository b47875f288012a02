"""The draft model on a device: context rows into the rings of its stages, proposals out.

Inside a block attention looks both ways, so a proposal's keys lie in scratch records: the window before the anchor, then
the block, whose rows all attend as if they stood at its end. Tokens are chosen by the caller, one after the other, and stay
on the device if it can. Knows no acceptance rule.

Shape legend: n captured rows, b proposals, k block size, W window, D head dim, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.models.deepseek_v41.config import DsparkConfig
from engine.models.deepseek_v41.device.attention import splits_of
from engine.models.deepseek_v41.device.layer import DeviceLayer, Flow, embedded, first_flow, layers_of
from engine.models.deepseek_v41.device.memory import DeviceMemory
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.parts import DraftParts, bits_of
from engine.models.deepseek_v41.device.recorded import Record, RecordedDrafts, RecordedVerify, record_on_gpu
from engine.models.deepseek_v41.device.turns import Turn, Turns
from engine.models.drafter import Captures, ChooseDraft, DraftRows, Proposal
from engine.models.model import KVTensors

I32 = npt.NDArray[np.int32]
_KEYS_TILE = 64


@dataclass(frozen=True, slots=True)
class _Block:
    """The rows of b proposals, k each, and where their keys lie."""

    owner: torch.Tensor  # int64 [b k] proposal of each row
    places: torch.Tensor  # int64 [b k] position of each row
    ends: torch.Tensor  # int64 [b k] position of the last row of its block
    floors: torch.Tensor  # int64 [b k] lowest position of its context
    old: tuple[torch.Tensor, torch.Tensor]  # int64 [b, W] each: engine rows and positions of the context
    turn: Turn
    kinds: torch.Tensor  # int32 [b k]


class DeviceDrafter:
    """Implements `engine.models.drafter.Drafter`."""

    def __init__(self, parts: DraftParts, model: DeviceDeepseekModel, kv: KVTensors) -> None:
        config = self._config = model.config
        assert config.dspark is not None
        self._dspark: DsparkConfig = config.dspark
        self.num_drafts = config.dspark.block_size
        self._parts = parts
        self._embed, self._head = model.parts.embed, model.parts.head
        self._device = model.device
        page_tokens = kv.layout.page_tokens
        self._recorded: RecordedDrafts | None = None
        self._ops: Ops = model.ops(page_tokens)
        memory = DeviceMemory(model.cache_map(page_tokens), kv)
        self._rings = [memory.windows[plan.index] for plan in config.stages]
        self._nowhere = next(iter(memory.owners.values())).entries
        self._turns = Turns(config, self._device)
        self._stages = layers_of(
            parts.stages, config.stages, config, config.dspark.top_k, parts.norm, beside=model.beside
        )
        self._fixed = False

    def observe(self, batch: ForwardBatch, captures: Captures, committed: I32) -> None:
        """Write the context rows of captured tokens; those of rejected ones are overwritten before they are read."""
        at = captures.at
        if not len(at):
            return
        q_start, committed_of = (torch.from_numpy(part).to(self._device).long() for part in (batch.q_start, committed))
        rows = torch.from_numpy(batch.rows).to(self._device).long()
        owner = torch.searchsorted(q_start[1:].contiguous(), at, right=True)
        ends = q_start[owner] + committed_of[owner]
        # Of a long chunk only the end fits into the ring.
        kept = (at < ends) & (at >= ends - self._rings[0].shape[1])
        positions = batch.positions.to(self._device)[at]
        self.write(captures.values, positions, rows[owner].masked_fill(~kept, -1))

    def record(self, how: Record) -> None:
        """Repeat the stages from recordings from now on."""
        self._recorded = RecordedDrafts(self._stages_of, self._device, how)

    def write(self, values: torch.Tensor, positions: torch.Tensor, record: torch.Tensor) -> None:
        """Store the context of captured rows bfloat16 [n, targets d] in all stages; `record` -1: not at all."""
        ops, eps, parts = self._ops, self._config.norm_eps, self._parts
        rows = ops.dense_linear(*ops.quantize_rows(values), *bits_of(parts.main_proj), fixed=self._fixed)
        _, codes, scales = ops.rms_quantize(rows, parts.main_norm, eps)
        turn = self._turns.at("window", positions, ops)
        latent = self._config.q_lora_rank
        for ring, stage in zip(self._rings, parts.stages, strict=True):
            both = ops.dense_linear(codes, scales, *bits_of(stage.attn.wqkv), fixed=self._fixed)
            at = positions % ring.shape[1]
            ops.store_window(both[:, latent:], stage.attn.kv_norm, turn.cos, turn.sin, record, at, ring, eps)

    def propose(self, wanted: DraftRows, choose: ChooseDraft) -> Proposal:
        """Draft k tokens behind every anchor."""
        rows = wanted.rows.astype(np.int64)
        if self._recorded is not None:
            base, last = self._recorded.run(rows, wanted.anchors, wanted.lengths)
        else:
            found = (torch.from_numpy(part).to(self._device) for part in (rows, wanted.anchors, wanted.lengths))
            base, last = self._stages_of(*found)
        return self._choose(torch.from_numpy(wanted.anchors).to(self._device), base, last, choose)

    def _stages_of(
        self, rows: torch.Tensor, anchors: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits float32 [b, k, V] that no token has corrected yet, and the un-normed rows [b, k, d]."""
        size = self.num_drafts
        block = self._block(rows, lengths)
        noise = torch.full_like(anchors, self._dspark.noise_token_id)
        ids = torch.stack((anchors, *(noise,) * (size - 1)), 1)
        norm = self._parts.stages[0].attn_norm
        streams = embedded(self._embed, ids.flatten(), self._config.mhc.mult)
        flow = first_flow(streams, norm, self._config.norm_eps, self._ops)
        for ring, stage in zip(self._rings, self._stages, strict=True):
            flow = self._stage(stage, ring, flow, block)
        last = (flow.pre[:, :, None] * flow.streams.float()).sum(1).unflatten(0, (-1, size))
        base = self._ops.plain_linear(flow.inputs.values, self._head, fixed=self._fixed)
        return base.unflatten(0, (-1, size)), last

    def _block(self, rows: torch.Tensor, lengths: torch.Tensor) -> _Block:
        device, size, window = self._device, self.num_drafts, self._config.window
        number = torch.arange(len(rows) * size, device=device)
        owner = number.div(size, rounding_mode="floor")
        places = lengths[owner] + number % size
        old = lengths[:, None] + torch.arange(-window, 0, device=device)
        return _Block(
            owner=owner,
            places=places,
            ends=lengths[owner] + size - 1,
            floors=(lengths[owner] - window).clamp(min=0),
            old=(rows[:, None].expand_as(old), old),
            turn=self._turns.at("window", places, self._ops),
            # Draft rows are text to the gate even if the vocabulary's noise token were the image token.
            kinds=torch.zeros(len(places), dtype=torch.int32, device=device),
        )

    def _stage(self, stage: DeviceLayer, ring: torch.Tensor, flow: Flow, block: _Block) -> Flow:
        ops, attention, turn = self._ops, stage.attention, block.turn
        mixed = stage.mixed(flow, ops)
        queries, latents = attention.projected(flow.inputs, turn, ops, fixed=self._fixed)
        capacity = self._config.window + self.num_drafts
        record, old = block.old
        scratch = torch.zeros(len(old), capacity, ring.shape[2], dtype=torch.uint8, device=ring.device)
        number = torch.arange(len(old), device=ring.device)[:, None]
        scratch[number, old % capacity] = ring[record, old % ring.shape[1]]
        at = block.places % capacity
        attention.store(latents, turn, (block.owner, at), scratch, ops)
        reach = -(-capacity // _KEYS_TILE) * _KEYS_TILE
        pages = torch.zeros(len(old), 1, dtype=torch.int32, device=ring.device)
        nothing = torch.empty(len(queries), 0, dtype=torch.int32, device=ring.device)
        attended = ops.sparse_attention(
            queries, scratch, block.owner, block.ends, block.floors, reach, self._nowhere, pages, block.owner, nothing,
            attention.sink, turn.cos, turn.sin, splits_of(len(queries), reach, fixed=self._fixed), quantized=True,
        )  # fmt: skip
        made = attention.project(attended, ops, fixed=self._fixed)
        return stage.finish(flow, mixed, made, block.kinds, ops, fixed=self._fixed)

    def _choose(self, anchors: torch.Tensor, base: torch.Tensor, rows: torch.Tensor, choose: ChooseDraft) -> Proposal:
        parts, ops, size = self._parts, self._ops, self.num_drafts
        before, tokens, confidences = anchors, list[torch.Tensor](), list[torch.Tensor]()
        for i in range(size):
            state = parts.markov_embed[before]
            own = base[:, i] + ops.plain_linear(state, parts.markov_head, fixed=self._fixed)
            # Confidence must not depend on the token it is about: it reads the un-normed row and the token before.
            certain = (torch.cat((rows[:, i], state.float()), 1) * parts.confidence).sum(1)
            before = choose(i, own)
            tokens.append(before)
            confidences.append(torch.sigmoid(certain))
        found = torch.stack(tokens, 1).cpu().numpy()
        return Proposal(found, torch.stack(confidences, 1).float().cpu().numpy())


class DraftingDeviceModel(DeviceDeepseekModel):
    """A model that comes with DSpark: `engine.models.drafter.SpeculativeModel`.

    On a GPU verify steps and drafts over the KV memory of the last drafter are repeated from recordings.
    """

    record: Record | None = None
    """How steps are recorded; None: on a GPU into graphs, elsewhere not."""
    _verify: tuple[KVTensors, RecordedVerify] | None = None

    @property
    def num_drafts(self) -> int:
        """Tokens that its drafter proposes at a time."""
        assert self.config.dspark is not None
        return self.config.dspark.block_size

    def drafter(self, kv: KVTensors) -> DeviceDrafter:
        """Return the drafter over the KV memory that `forward_captured` is called with."""
        assert self.parts.draft is not None
        drafter = DeviceDrafter(self.parts.draft, self, kv)
        how = self.record or (record_on_gpu if self.device.type == "cuda" else None)
        if how is not None and (self.record is not None or self.ops(kv.layout.page_tokens).captured):
            drafter.record(how)

            def forward(batch: ForwardBatch) -> tuple[torch.Tensor, Captures]:
                logits, captures = self._run(batch, kv)
                laid = batch.device_rows
                assert laid is not None
                # Rejected tokens' context is overwritten before it is read; padding's goes nowhere.
                owner = torch.searchsorted(laid.q_start[1:].contiguous(), captures.at.int(), right=True)
                record = laid.rows[owner.clamp(max=len(laid.rows) - 1)].long().masked_fill(batch.slots < 0, -1)
                drafter.write(captures.values, batch.positions, record)
                return logits, captures

            vocab, each = self.config.vocab_size, 1 + self.num_drafts
            self._verify = kv, RecordedVerify(forward, each, self.device, vocab, how)
        return drafter

    def forward_captured(self, batch: ForwardBatch, kv: KVTensors) -> tuple[torch.Tensor, Captures]:
        """As `forward`, and what the drafter observes: of every row that ran with a decoder window of its own."""
        if self._verify is not None and self._verify[0] is kv and self._verify[1].fits(batch):
            return self._verify[1].run(batch), self._nothing()[1]
        return self._run(batch.on(self.device) if batch.device_rows is None else batch, kv)
