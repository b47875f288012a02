"""The Llama family on a GPU: the arithmetic of `engine.models.llama` in few launches, and a forward that can be captured.

Products of one input are one product; residual additions, norms, rotation and stores are fused kernels of the table
of ops. Layers with sliding windows run through torch and are not captured. Never waits for the device otherwise.

Shape legend: t query tokens, h heads, k kv heads, d head_dim, b rows.
"""

from dataclasses import dataclass

import torch

from core.kv import KVLayout
from engine.attention.ring import RingAttention
from engine.batch import DeviceRows, ForwardBatch
from engine.kernels.ops import PROVIDERS, REFERENCE, Op, Provider, pick
from engine.layers.embedding import Embedding
from engine.layers.linear import DEVICE_ROW_TILE, Linear
from engine.layers.rotary import Rotary, rotate
from engine.models.config import LlamaConfig
from engine.models.llama_layout import FULL, WINDOW, llama_layout
from engine.models.loader import WeightSource
from engine.models.model import KVTensors, ModelFacts

_FIXED_SPLITS = 8
"""Parts of a token's keys in deterministic mode."""
_MOST_SPLITS = 32
_PROGRAMS = 528
"""Programs of one attention launch that fill a GPU: four for each of 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """Weights of one block on the device."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    component: str
    index: int
    """Layer index inside the component's records."""


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All weights of a model on the device."""

    embedding: Embedding
    layers: tuple[DeviceLayer, ...]
    norm: torch.Tensor
    head: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    batch: ForwardBatch
    rows: DeviceRows
    pages: torch.Tensor | None
    rings: RingAttention | None
    splits: int


class DeviceLlamaModel:
    """Implements `GraphModel`. Stateless but for its weights. `forward` needs `ForwardBatch.device_rows`."""

    def __init__(
        self,
        config: LlamaConfig,
        facts: ModelFacts,
        weights: DeviceWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        providers: tuple[Provider, ...] = PROVIDERS,
    ) -> None:
        self.facts = facts
        self.device = device
        self._config = config
        self._weights = weights
        rotary = Rotary(config.head_dim, config.max_positions, config.rope_theta, config.rope_scaling, dtype)
        self._cos, self._sin = rotary.tables(device)
        width = config.head_dim
        self._fused = dtype is not torch.float64 and width >= 16 and width & (width - 1) == 0
        self._providers = providers if self._fused else (REFERENCE,)
        self._add_norm, self._store_kv = self._op("add_norm"), self._op("store_kv")
        self._attend, self._silu_mul = self._op("paged_attention"), self._op("silu_mul")

    def _op(self, name: str) -> Op:
        """Return an op; kernels have no float64, and heads of a power of two only."""
        return pick(name, self.device, self._providers)

    def kv_layout(self, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
        """As the model on host memory has it."""
        return llama_layout(self._config, self.facts.kv_dtype, num_pages, num_rows, page_tokens)

    def graph_ready(self, batch: ForwardBatch) -> bool:
        """Decode steps of models without sliding windows."""
        rows = batch.device_rows
        return self._fused and rows is not None and rows.max_q == 1 and not any(self._config.windows)

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write KV of all query tokens, return logits [m, vocab] for `batch.sample_at`."""
        fixed, eps, weights = batch.deterministic, self._config.norm_eps, self._weights
        step = self._step(batch, kv)
        x = weights.embedding.forward(batch.token_ids)
        delta: torch.Tensor | None = None
        for layer in weights.layers:
            normed = self._add_norm(x, delta, layer.input_norm, eps)
            attended = self._attention(layer, layer.qkv.forward(normed, deterministic=fixed), step)
            delta = layer.output.forward(attended, deterministic=fixed)
            normed = self._add_norm(x, delta, layer.post_norm, eps)
            active = self._silu_mul(layer.gate_up.forward(normed, deterministic=fixed))
            delta = layer.down.forward(active, deterministic=fixed)
        normed = self._add_norm(x, delta, weights.norm, eps)
        logits = weights.head.forward(normed[batch.sample_at], deterministic=fixed)
        return logits.float() if logits.dtype is torch.bfloat16 else logits

    def _step(self, batch: ForwardBatch, kv: KVTensors) -> _Step:
        rows = batch.device_rows
        assert rows is not None, "a model on a device needs the rows of its steps there"
        kinds = {component.name for component in kv.layout.components}
        splits = _FIXED_SPLITS
        if not batch.deterministic:
            splits = 1
            while splits < _MOST_SPLITS and splits * len(rows.rows) * self._config.num_kv_heads < _PROGRAMS:
                splits *= 2
        return _Step(
            batch=batch,
            rows=rows,
            pages=kv.paged(FULL) if FULL in kinds else None,
            rings=RingAttention(batch, kv.per_row(WINDOW), max(self._config.windows)) if WINDOW in kinds else None,
            splits=splits,
        )

    def _attention(self, layer: DeviceLayer, qkv: torch.Tensor, step: _Step) -> torch.Tensor:
        """Return [t, h d] for the projections [t, (h + 2k) d] of a layer; stores its keys and values."""
        batch, rows = step.batch, step.rows
        if layer.component == WINDOW:
            return self._windowed(layer, qkv, step)
        assert step.pages is not None
        pages = step.pages[:, layer.index]
        query = self._store_kv(qkv, self._cos, self._sin, batch.positions, batch.slots, pages)
        out = self._attend(
            query,
            pages,
            batch.page_table,
            rows.q_start,
            rows.seq_start,
            rows.max_q,
            step.splits,
            batch.deterministic,
        )
        return out.view(len(qkv), -1)

    def _windowed(self, layer: DeviceLayer, qkv: torch.Tensor, step: _Step) -> torch.Tensor:
        assert step.rings is not None
        config, positions = self._config, step.batch.positions
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        heads = qkv.unflatten(1, (-1, config.head_dim))
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        out = step.rings.forward(layer.index, rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous())
        return out.view(len(qkv), -1)


def build_device_weights(config: LlamaConfig, checkpoint: WeightSource, device: torch.device) -> DeviceWeights:
    """Take all tensors that a configuration asks for to a device, layer by layer; raises `CheckpointError`."""
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def joined(parts: tuple[tuple[str, int], ...], columns: int, bias: bool) -> Linear:
        """One product for the outputs of several, in their order."""
        weight = torch.cat([checkpoint.take(f"{name}.weight", (rows, columns)) for name, rows in parts]).to(device)
        added = (
            torch.cat([checkpoint.take(f"{name}.bias", (rows,)) for name, rows in parts]).to(device) if bias else None
        )
        return Linear(weight, added, DEVICE_ROW_TILE)

    def norm(name: str) -> torch.Tensor:
        return checkpoint.take(f"{name}.weight", (width,)).to(device)

    def layer(i: int) -> DeviceLayer:
        at = f"model.layers.{i}"
        own = f"{at}.self_attn"
        slides = config.windows[i] > 0
        projections = ((f"{own}.q_proj", query_width), (f"{own}.k_proj", kv_width), (f"{own}.v_proj", kv_width))
        return DeviceLayer(
            qkv=joined(projections, width, config.qkv_bias),
            output=joined(((f"{own}.o_proj", width),), query_width, config.output_bias),
            gate_up=joined(((f"{at}.mlp.gate_proj", inner), (f"{at}.mlp.up_proj", inner)), width, config.mlp_bias),
            down=joined(((f"{at}.mlp.down_proj", width),), inner, config.mlp_bias),
            input_norm=norm(f"{at}.input_layernorm"),
            post_norm=norm(f"{at}.post_attention_layernorm"),
            component=WINDOW if slides else FULL,
            index=sum((window > 0) == slides for window in config.windows[:i]),
        )

    table = checkpoint.take("model.embed_tokens.weight", (config.vocab_size, width)).to(device)
    head = table if config.tied_head else checkpoint.take("lm_head.weight", (config.vocab_size, width)).to(device)
    weights = DeviceWeights(
        embedding=Embedding(table),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=norm("model.norm"),
        head=Linear(head, row_tile=DEVICE_ROW_TILE),
    )
    checkpoint.finish(ignore=("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied_head else ())))
    return weights
