"""The Llama family (Llama, Mistral, Qwen2): grouped-query attention with rotary positions, gated feed-forward blocks.

Full-attention layers keep their KV in the paged component ``full``; sliding-window layers in per-row rings, component
``window``. Dtypes: float32, float64, bfloat16; logits are float32 or float64.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.errors import CheckpointError
from core.kv import ComponentKind, KVLayout
from engine.attention.paged import PagedAttention
from engine.attention.ring import RingAttention
from engine.batch import ForwardBatch
from engine.device import CPU
from engine.kernels.ops import PROVIDERS, Provider
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary, rotate
from engine.models.config import LlamaConfig, parse_llama
from engine.models.llama_device import DeviceLlamaModel, build_device_weights
from engine.models.llama_layout import FULL, WINDOW, llama_layout
from engine.models.loader import DTYPES, WeightSource, open_weights
from engine.models.manifest import Manifest
from engine.models.model import KVTensors, ModelFacts


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block and where its KV lies."""

    input_norm: RMSNorm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    post_norm: RMSNorm
    mlp: GatedMLP
    component: str
    index: int
    """Layer index inside the component's records."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    cos: torch.Tensor
    sin: torch.Tensor
    attention: dict[str, PagedAttention | RingAttention]
    deterministic: bool


class LlamaModel:
    """Implements `engine.models.model.Model`. Stateless but for its weights; safe to share between executors."""

    device = CPU

    def __init__(self, config: LlamaConfig, facts: ModelFacts, weights: Weights, dtype: torch.dtype) -> None:
        self.facts = facts
        self._config = config
        self._weights = weights
        self._rotary = Rotary(config.head_dim, config.max_positions, config.rope_theta, config.rope_scaling, dtype)
        self._window = max(config.windows)

    def kv_layout(self, num_pages: int, num_rows: int, page_tokens: int) -> KVLayout:
        """Components ``full`` and ``window``, each only if the model has such layers."""
        return llama_layout(self._config, self.facts.kv_dtype, num_pages, num_rows, page_tokens)

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> torch.Tensor:
        """Write KV of all query tokens, return logits [m, vocab] for `batch.sample_at`."""
        if not len(batch.token_ids):
            return torch.zeros(0, self._config.vocab_size)
        cos, sin = self._rotary.at(batch.positions)
        step = _Step(cos, sin, self._attention(batch, kv), batch.deterministic)
        x = self._weights.embedding.forward(batch.token_ids)
        for layer in self._weights.layers:
            x = x + self._attend(layer, layer.input_norm.forward(x), step)
            x = x + layer.mlp.forward(layer.post_norm.forward(x), deterministic=step.deterministic)
        last = self._weights.norm.forward(x[batch.sample_at])
        logits = self._weights.head.forward(last, deterministic=step.deterministic)
        return logits.float() if logits.dtype is torch.bfloat16 else logits

    def _attention(self, batch: ForwardBatch, kv: KVTensors) -> dict[str, PagedAttention | RingAttention]:
        found: dict[str, PagedAttention | RingAttention] = {}
        for component in kv.layout.components:
            if component.kind is ComponentKind.PAGED:
                found[component.name] = PagedAttention(batch, kv.paged(component.name))
            else:
                found[component.name] = RingAttention(batch, kv.per_row(component.name), self._window)
        return found

    def _attend(self, layer: Layer, x: torch.Tensor, step: _Step) -> torch.Tensor:
        num_tokens, head_dim, fixed = x.shape[0], self._config.head_dim, step.deterministic
        query = layer.query.forward(x, deterministic=fixed).view(num_tokens, -1, head_dim)
        key = layer.key.forward(x, deterministic=fixed).view(num_tokens, -1, head_dim)
        value = layer.value.forward(x, deterministic=fixed).view(num_tokens, -1, head_dim)
        query, key = rotate(query, step.cos, step.sin), rotate(key, step.cos, step.sin)
        out = step.attention[layer.component].forward(layer.index, query, key, value)
        return layer.output.forward(out.view(num_tokens, -1), deterministic=fixed)


def build_weights(config: LlamaConfig, checkpoint: WeightSource) -> Weights:
    """Take all tensors that a configuration asks for, under Hugging Face's names; raises `CheckpointError`."""
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def linear(name: str, rows: int, columns: int, bias: bool) -> Linear:
        weight = checkpoint.take(f"{name}.weight", (rows, columns))
        return Linear(weight, checkpoint.take(f"{name}.bias", (rows,)) if bias else None)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(checkpoint.take(f"{name}.weight", (width,)), config.norm_eps)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        slides = config.windows[i] > 0
        return Layer(
            input_norm=norm(f"{at}.input_layernorm"),
            query=linear(f"{at}.self_attn.q_proj", query_width, width, config.qkv_bias),
            key=linear(f"{at}.self_attn.k_proj", kv_width, width, config.qkv_bias),
            value=linear(f"{at}.self_attn.v_proj", kv_width, width, config.qkv_bias),
            output=linear(f"{at}.self_attn.o_proj", width, query_width, config.output_bias),
            post_norm=norm(f"{at}.post_attention_layernorm"),
            mlp=GatedMLP(
                linear(f"{at}.mlp.gate_proj", inner, width, config.mlp_bias),
                linear(f"{at}.mlp.up_proj", inner, width, config.mlp_bias),
                linear(f"{at}.mlp.down_proj", width, inner, config.mlp_bias),
            ),
            component=WINDOW if slides else FULL,
            index=sum((window > 0) == slides for window in config.windows[:i]),
        )

    table = checkpoint.take("model.embed_tokens.weight", (config.vocab_size, width))
    head = table if config.tied_head else checkpoint.take("lm_head.weight", (config.vocab_size, width))
    weights = Weights(
        embedding=Embedding(table),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=norm("model.norm"),
        head=Linear(head),
    )
    checkpoint.finish(ignore=("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied_head else ())))
    return weights


def load(
    directory: Path,
    config: dict[str, Any],
    manifest: Manifest,
    name: str,
    dtype: str | None,
    *,
    device: torch.device = CPU,
    providers: tuple[Provider, ...] = PROVIDERS,
) -> LlamaModel | DeviceLlamaModel:
    """Build the model of a checkpoint directory; called by the registry. `dtype` None: the checkpoint's own."""
    path = directory / "config.json"
    parsed = parse_llama(config, path)
    if len({window for window in parsed.windows if window}) > 1:
        raise CheckpointError(f"{path} has sliding windows of different sizes, which is not supported")
    elem = dtype or parsed.dtype
    if elem not in DTYPES:
        raise CheckpointError(f"dtype {elem!r} is not supported; known are {', '.join(DTYPES)}")
    facts = ModelFacts(
        name=name,
        revision=manifest.revision,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=parsed.vocab_size,
        max_positions=parsed.max_positions,
        eos_token_ids=parsed.eos_token_ids,
        kv_dtype=elem,
    )
    weights = open_weights(directory, config, DTYPES[elem], device)
    if device.type != "cpu":
        moved = build_device_weights(parsed, weights, device)
        return DeviceLlamaModel(parsed, facts, moved, DTYPES[elem], device, providers=providers)
    return LlamaModel(parsed, facts, build_weights(parsed, weights), DTYPES[elem])
