"""The tensors that a checkpoint of a configuration consists of: published names, types and shapes. Knows no files."""

import math
from collections.abc import Iterator

import msgspec

from engine.models.deepseek_v41.config import V41Config, VisionConfig
from engine.models.deepseek_v41.layer_map import LayerPlan

BF16, F32, E4M3, E8M0, I8 = "BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"
ITEM_BYTES = {
    BF16: 2, F32: 4, E4M3: 1, E8M0: 1, I8: 1, "U8": 1, "F4": 1, "F16": 2, "F64": 8, "I32": 4, "I64": 8
}  # fmt: skip
_PLAIN = (BF16, F32, "F16", "F64")
_BYTES = (I8, "U8", "F4")
_SCALE_BYTES = (E8M0, "U8")
_GROUP = 32
"""Values of packed expert weights and of table rows that share a scale."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """As published and as the exporter writes it, in safetensors' spelling."""
    shape: tuple[int, ...]
    accepted: tuple[str, ...]
    """Types that a checkpoint may have instead."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor as published."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def inventory(config: V41Config) -> Iterator[TensorSpec]:
    """Yield every tensor of the checkpoint once."""
    yield _plain("embed.weight", config.vocab_size, config.hidden_size)
    for layer in config.layers:
        yield from _block(config, layer, f"layers.{layer.index}", config.moe.num_experts)
    yield _plain("norm.weight", config.hidden_size)
    yield _plain("head.weight", config.vocab_size, config.hidden_size)
    if config.is_v4:
        yield from _head_mix(config, "")
    for i in range(config.num_mtp_layers):
        yield from _next_token(config, i)
    if config.dspark is not None:
        yield from _dspark(config)
    if config.vision is not None:
        yield from _vision(config, config.vision)


def _plain(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, BF16, shape, _PLAIN)


def _float(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, F32, shape, _PLAIN)


def _linear(config: V41Config, name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    """Yield a dense quantized weight and its scales by blocks."""
    rows, columns = config.quant.block
    yield TensorSpec(f"{name}.weight", E4M3, (out, inner), (E4M3,))
    yield TensorSpec(f"{name}.scale", E8M0, (-(-out // rows), -(-inner // columns)), (*_SCALE_BYTES, F32))


def _expert(config: V41Config, name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    if config.quant.expert_dtype != "fp4":
        yield from _linear(config, name, out, inner)
        return
    yield TensorSpec(f"{name}.weight", I8, (out, inner // 2), _BYTES)
    yield TensorSpec(f"{name}.scale", E8M0, (out, inner // _GROUP), _SCALE_BYTES)


def _mix(config: V41Config, name: str) -> Iterator[TensorSpec]:
    streams = config.mhc.mult
    count = (2 + streams) * streams
    yield _float(f"{name}_fn", count, streams * config.hidden_size)
    yield _float(f"{name}_base", count)
    yield _float(f"{name}_scale", 3)


def _head_mix(config: V41Config, prefix: str) -> Iterator[TensorSpec]:
    streams = config.mhc.mult
    yield _float(f"{prefix}hc_head_fn", streams, streams * config.hidden_size)
    yield _float(f"{prefix}hc_head_base", streams)
    yield _float(f"{prefix}hc_head_scale", 1)


def _block(config: V41Config, layer: LayerPlan, at: str, num_experts: int) -> Iterator[TensorSpec]:
    yield _plain(f"{at}.attn_norm.weight", config.hidden_size)
    yield _plain(f"{at}.ffn_norm.weight", config.hidden_size)
    yield from _mix(config, f"{at}.hc_attn")
    yield from _mix(config, f"{at}.hc_ffn")
    yield from _attention(config, layer, f"{at}.attn")
    yield from _moe(config, layer, f"{at}.ffn", num_experts)
    if layer.has_engram:
        yield from _engram(config, layer, f"{at}.engram")


def _attention(config: V41Config, layer: LayerPlan, at: str) -> Iterator[TensorSpec]:
    hidden, heads, width = config.hidden_size, config.num_heads, config.head_dim
    yield _float(f"{at}.attn_sink", heads)
    yield from _linear(config, f"{at}.wq_a", config.q_lora_rank, hidden)
    yield _plain(f"{at}.q_norm.weight", config.q_lora_rank)
    yield from _linear(config, f"{at}.wq_b", heads * width, config.q_lora_rank)
    yield from _linear(config, f"{at}.wkv", width, hidden)
    yield _plain(f"{at}.kv_norm.weight", width)
    yield from _linear(config, f"{at}.wo_a", config.o_groups * config.o_lora_rank, heads * width // config.o_groups)
    yield from _linear(config, f"{at}.wo_b", hidden, config.o_groups * config.o_lora_rank)
    if layer.owns_kv:
        yield from _compressor(config, layer, f"{at}.compressor", width)
    if layer.owns_index_keys and not config.is_v4:
        yield _plain(f"{at}.indexer.k_norm.weight", config.index.head_dim)
        yield _plain(f"{at}.indexer.wk.weight", config.index.head_dim, width)
    if layer.owns_index_query:
        count = config.index.num_heads
        yield from _linear(config, f"{at}.indexer.wq_b", count * config.index.head_dim, config.q_lora_rank)
        yield _plain(f"{at}.indexer.weights_proj.weight", count, hidden)
        if config.index.own_compressor:
            yield from _compressor(config, layer, f"{at}.indexer.compressor", config.index.head_dim)


def _compressor(config: V41Config, layer: LayerPlan, at: str, width: int) -> Iterator[TensorSpec]:
    channels = 2 * width if layer.overlap else width
    if config.is_v4:
        yield _float(f"{at}.ape", layer.m, channels)
    yield _plain(f"{at}.norm.weight", width)
    yield _plain(f"{at}.wkv.weight", channels, config.hidden_size)
    if layer.m > 1:
        yield _plain(f"{at}.wgate.weight", channels, config.hidden_size)


def _moe(config: V41Config, layer: LayerPlan, at: str, num_experts: int) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.moe.inner_size
    yield _plain(f"{at}.gate.weight", num_experts, hidden)
    if layer.hash_routed:
        shape = (config.vocab_size, config.moe.top_k)
        yield TensorSpec(f"{at}.gate.tid2eid", "I64", shape, ("I64", "I32"))
    else:
        yield _float(f"{at}.gate.bias", num_experts)
    if config.moe.image_bias:
        yield _float(f"{at}.gate.bias_vl", num_experts)
    for e in range(num_experts):
        for name, out, width in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
            yield from _expert(config, f"{at}.experts.{e}.{name}", out, width)
    for name, out, width in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
        yield from _linear(config, f"{at}.shared_experts.{name}", out, width)


def _engram(config: V41Config, layer: LayerPlan, at: str) -> Iterator[TensorSpec]:
    engram, streams = config.engram, config.mhc.mult
    assert engram is not None, "a layer has an n-gram table but the configuration has none"
    rows = engram.num_rows[engram.layers.index(layer.index)]
    yield TensorSpec(f"{at}.embed.weight", E4M3, (rows, engram.head_dim), (E4M3,))
    yield TensorSpec(f"{at}.embed.scale", E8M0, (rows, engram.head_dim // _GROUP), _SCALE_BYTES)
    yield from _linear(config, f"{at}.wkv", (streams + 1) * config.hidden_size, engram.num_columns * engram.head_dim)
    yield _plain(f"{at}.q_weight", streams, config.hidden_size)
    yield _plain(f"{at}.k_weight", streams, config.hidden_size)


def _dspark(config: V41Config) -> Iterator[TensorSpec]:
    dspark, hidden = config.dspark, config.hidden_size
    assert dspark is not None
    for i, stage in enumerate(config.stages):
        yield from _block(config, stage, f"mtp.{i}", dspark.num_experts)
    yield from _linear(config, "mtp.0.main_proj", hidden, len(dspark.target_layers) * hidden)
    yield _plain("mtp.0.main_norm.weight", hidden)
    last = f"mtp.{dspark.num_stages - 1}"
    yield _plain(f"{last}.norm.weight", hidden)
    yield _plain(f"{last}.markov_head.embed.weight", config.vocab_size, dspark.markov_rank)
    yield _plain(f"{last}.markov_head.head.weight", config.vocab_size, dspark.markov_rank)
    yield _plain(f"{last}.confidence_head.proj.weight", 1, hidden + dspark.markov_rank)


def _next_token(config: V41Config, i: int) -> Iterator[TensorSpec]:
    """Yield V4's next-token layer."""
    at, hidden = f"mtp.{i}", config.hidden_size
    plan = LayerPlan(index=config.num_layers + i, mode="window", m=0)
    yield from _block(config, plan, at, config.moe.num_experts)
    for name in ("e_proj", "h_proj"):
        yield from _linear(config, f"{at}.{name}", hidden, hidden)
    for name in ("enorm", "hnorm", "norm"):
        yield _plain(f"{at}.{name}.weight", hidden)
    yield from _head_mix(config, f"{at}.")


def _vision(config: V41Config, vision: VisionConfig) -> Iterator[TensorSpec]:
    hidden, width, inner = config.hidden_size, vision.hidden_size, vision.inner_size
    for name in ("image_start", "image_end", "image_newline"):
        yield _plain(name, hidden)
    yield from _biased("aligner.w1", hidden, vision.downsample_ratio**2 * width)
    yield from _biased("aligner.w2", hidden, hidden)
    yield from _biased("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
    yield _plain("vision.norm.weight", width)
    for i in range(vision.num_layers):
        at = f"vision.blocks.{i}"
        yield from _biased(f"{at}.attn.wqkv", 3 * width, width)
        yield from _biased(f"{at}.attn.wo", width, width)
        yield _plain(f"{at}.mlp.w1.weight", 2 * inner, width)
        yield _plain(f"{at}.mlp.w2.weight", width, inner)
        yield _plain(f"{at}.norm1.weight", width)
        yield _plain(f"{at}.norm2.weight", width)


def _biased(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield _plain(f"{name}.weight", out, inner)
    yield _plain(f"{name}.bias", out)
