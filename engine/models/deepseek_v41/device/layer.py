"""One layer on a device: streams and the input of its attention in, streams and the input of the next layer out.

Expanding a sublayer's output over the streams, collapsing them for the next sublayer, its norm and quantization are one
op, because the coefficients of a collapse are known before the streams are (single-pass mixing). So a layer ends with the
norm of whatever comes next.

Shape legend: t tokens, hc streams, d hidden.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.attention import DeviceAttention, Inputs, StepRun
from engine.models.deepseek_v41.device.beside import Beside
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.parts import LayerParts, Mix, MoeParts, bits_of
from engine.models.deepseek_v41.layer_map import LayerPlan


@dataclass(frozen=True, slots=True)
class Flow:
    """What passes from layer to layer: always all of it, whatever happens to the rows."""

    streams: torch.Tensor  # bfloat16 [t, hc, d]
    pre: torch.Tensor  # float32 [t, hc] what the streams were collapsed with
    inputs: Inputs

    def take(self, rows: torch.Tensor) -> "Flow":
        """Return some rows."""
        return Flow(self.streams[rows], self.pre[rows], self.inputs.take(rows))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Coefficients of one sublayer, float32 [t, hc], [t, hc], [t, hc, hc]."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class DeviceLayer:
    """A backbone layer or a draft stage."""

    def __init__(
        self,
        parts: LayerParts,
        plan: LayerPlan,
        config: V41Config,
        top_k: int,
        next_norm: torch.Tensor,
        *,
        beside: Beside,
    ) -> None:
        """`next_norm` float32 [d]: of the next layer's attention, or the model's last."""
        self.plan = plan
        self.attention = DeviceAttention(parts.attn, plan, config, beside)
        self._beside = beside
        self._parts = parts
        self._next_norm = next_norm
        self._eps, self._mix_eps = config.norm_eps, config.mhc.eps
        self._moe = DeviceMoe(parts.moe, config, top_k)

    def recall(self, flow: Flow, ngrams: torch.Tensor, token_map: torch.Tensor, run: StepRun) -> Flow:
        """Apply the layer's n-gram memory to the streams before it; `ngrams` int64 [t, n]."""
        parts = self._parts.engram
        assert parts is not None
        codes, scales = run.ops.engram_lookup(ngrams, token_map, parts.columns, parts.table)
        projected = run.ops.dense_linear(codes, scales, *bits_of(parts.wkv), fixed=run.fixed)
        streams = run.ops.engram_gate(flow.streams, projected, parts.weight, run.step.images, self._eps)
        inputs = run.ops.collapse_streams(streams, flow.pre, self._parts.attn_norm, self._eps)
        return Flow(streams, flow.pre, Inputs(*inputs))

    def forward(self, flow: Flow, run: StepRun) -> Flow:
        """Return the flow behind the layer."""
        mixed = self.mixed(flow, run.ops)
        attended = self.attention.forward(flow.inputs, run)
        return self.finish(flow, mixed, attended, run.step.tokens.kinds, run.ops, fixed=run.fixed)

    def mixed(self, flow: Flow, ops: Ops) -> Mixed:
        """Return the coefficients of the attention sublayer; `finish` waits for them."""
        with self._beside.work(len(flow.streams)):
            return self._mix(flow.streams, self._parts.mix_attn, ops)

    def finish(
        self, flow: Flow, mixed: Mixed, attended: torch.Tensor, kinds: torch.Tensor, ops: Ops, *, fixed: bool
    ) -> Flow:
        """Return the flow behind the layer, given the attention sublayer's coefficients and output [t, d].

        `kinds` int32 [t] as in `TokenRows`.
        """
        parts = self._parts
        self._beside.join()
        streams, *inputs = ops.mix_streams(
            attended, flow.streams, mixed.post, mixed.comb, mixed.pre, parts.ffn_norm, self._eps
        )
        given = Inputs(*inputs)
        with self._beside.work(len(streams)):
            then = self._mix(streams, parts.mix_ffn, ops)
            shared = self._moe.shared(given, ops, fixed=fixed)
        made = self._moe.routed(given, kinds, ops, fixed=fixed)
        self._beside.join()
        streams, *inputs = ops.mix_streams(
            shared, streams, then.post, then.comb, then.pre, self._next_norm, self._eps, made
        )
        return Flow(streams, then.pre, Inputs(*inputs))

    def _mix(self, streams: torch.Tensor, mix: Mix, ops: Ops) -> Mixed:
        return Mixed(*ops.stream_coefficients(streams, mix.fn, mix.scale, mix.base, self._eps, self._mix_eps))


class DeviceMoe:
    """The feed-forward sublayer."""

    def __init__(self, parts: MoeParts, config: V41Config, top_k: int) -> None:
        self._parts = parts
        self._config = config.moe
        self._top_k = top_k
        self._eps = config.moe.weight_eps

    def routed(self, inputs: Inputs, kinds: torch.Tensor, ops: Ops, *, fixed: bool) -> torch.Tensor:
        """Return what every row's experts make of it, bfloat16 [t k, d]; `kinds` int32 [t] as in `TokenRows`."""
        parts, config = self._parts, self._config
        logits = ops.plain_linear(inputs.values, parts.gate, fixed=fixed)
        experts, weights = ops.choose_routes(
            logits, parts.bias, kinds, self._top_k, config.gate_temp, self._eps, config.route_scale
        )
        order, offsets = ops.sort_routes(experts, len(parts.gate))
        inner = ops.experts_up(inputs.codes, inputs.scales, order, offsets, parts.w13, weights, config.swiglu_limit)
        return ops.experts_down(*inner, order, offsets, parts.w2)

    def shared(self, inputs: Inputs, ops: Ops, *, fixed: bool) -> torch.Tensor:
        """Return what the shared expert makes of rows, bfloat16 [t, d]."""
        parts = self._parts
        inner = ops.dense_linear(inputs.codes, inputs.scales, *bits_of(parts.shared_w13), fixed=fixed)
        inner = ops.swiglu_quantize(inner, self._config.swiglu_limit)
        return ops.dense_linear(*inner, *bits_of(parts.shared_w2), fixed=fixed)


def layers_of(
    parts: tuple[LayerParts, ...],
    plans: tuple[LayerPlan, ...],
    config: V41Config,
    top_k: int,
    last_norm: torch.Tensor,
    *,
    beside: Beside,
) -> tuple[DeviceLayer, ...]:
    """Return a run of layers; `last_norm` float32 [d] is of what comes behind."""
    norms = [*(layer.attn_norm for layer in parts[1:]), last_norm]
    return tuple(
        DeviceLayer(one, plan, config, top_k, norm, beside=beside)
        for one, plan, norm in zip(parts, plans, norms, strict=True)
    )


def first_flow(streams: torch.Tensor, norm: torch.Tensor, eps: float, ops: Ops) -> Flow:
    """Return the flow into the first layer of embeddings bfloat16 [t, hc, d], the same in all streams; stream 0 is read."""
    pre = torch.zeros(streams.shape[:2], device=streams.device)
    pre[:, 0] = 1
    return Flow(streams, pre, Inputs(*ops.rms_quantize(streams[:, 0], norm, eps)))


def embedded(table: torch.Tensor, ids: torch.Tensor, hc: int) -> torch.Tensor:
    """Return bfloat16 [t, hc, d]: rows `ids` int64 [t] of a table [V, d] in every stream."""
    return table[ids[:, None].expand(-1, hc)]
