"""DeepSeek-V4.1 on a device: the same layers, rules and KV bytes as `engine.models.deepseek_v41.model`, over fused ops.

Streams and the values between ops are bfloat16, as published; sums, statistics and coefficients are float32. The forward
neither waits for the device nor has shapes that depend on values, so that a step without replay floors can be captured
where every op is a kernel. Stateless but for its weights; used by one executor thread.

Shape legend: t tokens, hc streams, d hidden, V vocabulary.
"""

import torch

from engine.batch import ForwardBatch
from engine.kernels.ops import PROVIDERS, Provider
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.attention import StepRun
from engine.models.deepseek_v41.device.beside import Beside
from engine.models.deepseek_v41.device.layer import Flow, embedded, first_flow, layers_of
from engine.models.deepseek_v41.device.memory import DeviceMemory
from engine.models.deepseek_v41.device.ops import Ops, check_supported, ops_of
from engine.models.deepseek_v41.device.parts import ModelParts
from engine.models.deepseek_v41.device.rows import DeviceStep
from engine.models.deepseek_v41.device.selection import Selections
from engine.models.deepseek_v41.device.turns import Turns
from engine.models.deepseek_v41.device.windows import Windows
from engine.models.deepseek_v41.packed_model import PackedModel
from engine.models.deepseek_v41.step import DecoderReplay
from engine.models.drafter import Captures
from engine.models.model import ImageEncoder, KVTensors, ModelFacts


class DeviceDeepseekModel(PackedModel):
    """Implements `engine.models.model.Model` and `GraphModel`."""

    def __init__(
        self,
        config: V41Config,
        parts: ModelParts,
        facts: ModelFacts,
        *,
        replay: DecoderReplay | None = None,
        image_encoder: ImageEncoder | None = None,
        providers: tuple[Provider, ...] = PROVIDERS,
    ) -> None:
        """Raises `ConfigError` for models whose forms only the CPU has."""
        check_supported(config)
        super().__init__(config, facts, parts.embed.device, "f32", replay=replay, image_encoder=image_encoder)
        self.parts = parts
        self._providers = providers
        self._turns = Turns(config, self.device)
        self.beside = Beside(self.device)
        self.layers = layers_of(parts.layers, config.layers, config, config.moe.top_k, parts.norm, beside=self.beside)
        self._ops: dict[int, Ops] = {}

    def ops(self, page_tokens: int) -> Ops:
        """Return what the model computes with."""
        found = self._ops.get(page_tokens)
        if found is None:
            found = self._ops[page_tokens] = ops_of(self.config, page_tokens, self.device, self._providers)
        return found

    def graph_ready(self, batch: ForwardBatch) -> bool:
        """Return whether the forward of such a batch can be captured: no floors, no images, no chunk of a prompt."""
        rows = batch.device_rows
        step_tokens = self.cache_map(batch.page_tokens).step_tokens
        is_plain = batch.replay is None and batch.images is None and rows is not None and rows.max_q <= step_tokens
        return is_plain and self.ops(batch.page_tokens).captured

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write KV of all query tokens, return logits float32 [m, V] for `batch.sample_at`."""
        return self._run(batch, kv, captured=False)[0]

    def _run(self, batch: ForwardBatch, kv: KVTensors, *, captured: bool = True) -> tuple[torch.Tensor, Captures]:
        """Return logits, and if wanted the captures of every row that ran with a decoder window of its own."""
        if not len(batch.token_ids):
            return self._nothing()
        ops = self.ops(batch.page_tokens)
        step = DeviceStep(self.config, self.replay, batch, self._turns, self.device, ops=ops)
        memory = DeviceMemory(self.cache_map(batch.page_tokens), kv)
        run = self._shared(step, memory, ops, fixed=batch.deterministic)
        flow = self._embed(step, batch, run)
        ngrams = None if self.config.engram is None else step.ngrams()
        captures: list[torch.Tensor] = []
        for layer in self.layers:
            if layer.plan.has_engram:
                assert ngrams is not None
                assert self.parts.token_map is not None
                flow = layer.recall(flow, ngrams, self.parts.token_map, run)
            if captured and layer.plan.is_captured:
                captures.append(flow.streams.float().mean(1))
            layer.attention.write_entries(flow.inputs, run)
            if layer.plan.index == self.config.decoder_start:
                if step.has_floors:
                    # Entries are made of rows that the step and `flow` let go of.
                    self.beside.join()
                kept = step.enter_decoder()
                if kept is not None:
                    if not len(kept):
                        return self._nothing()
                    flow = flow.take(kept)
                if step.has_floors:
                    run = self._shared(step, memory, run.ops, fixed=run.fixed)
            self.executed_rows[layer.plan.index] += step.tokens.count
            flow = layer.forward(flow, run)
        logits = run.ops.plain_linear(flow.inputs.values[step.sampled()], self.parts.head, fixed=run.fixed)
        return logits, self._captures(captures, step)

    def _shared(self, step: DeviceStep, memory: DeviceMemory, ops: Ops, *, fixed: bool) -> StepRun:
        windows = Windows(step, self.config.window, memory.step_tokens, ops)
        return StepRun(step, memory, ops, windows, Selections(step, self.config, ops), fixed)

    def _embed(self, step: DeviceStep, batch: ForwardBatch, run: StepRun) -> Flow:
        streams = embedded(self.parts.embed, step.ids, self.config.mhc.mult)
        if batch.images is not None:
            streams[batch.images.at.to(self.device)] = batch.images.rows.to(self.device, torch.bfloat16)[:, None]
        return first_flow(streams, self.parts.layers[0].attn_norm, self.config.norm_eps, run.ops)

    def _captures(self, captures: list[torch.Tensor], step: DeviceStep) -> Captures:
        if not captures:
            return self._nothing()[1]
        tokens = step.tokens
        at = torch.arange(len(step.ids), device=self.device) if tokens.at is None else tokens.at
        values = torch.cat(captures, 1).bfloat16()
        if not step.has_floors:
            return Captures(at, values)
        return Captures(at[tokens.kept], values[tokens.kept])

    def _nothing(self) -> tuple[torch.Tensor, Captures]:
        width = len(self.config.dspark.target_layers) * self.config.hidden_size if self.config.dspark else 0
        logits = torch.zeros(0, self.config.vocab_size, device=self.device)
        at = torch.zeros(0, dtype=torch.int64, device=self.device)
        return logits, Captures(at, torch.zeros(0, width, dtype=torch.bfloat16, device=self.device))
