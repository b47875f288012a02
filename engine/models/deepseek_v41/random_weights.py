"""Random weights of any configuration of the family, the same on every machine: what generated checkpoints contain.

Spreads keep every part of the model alive (sinks, Sinkhorn, biases, gates), and every value is one that its published
format holds exactly, so that writing a checkpoint and reading it back changes nothing. Tensors are drawn one by one,
each from a stream of its own by its name. Knows no file.

Shape legend: see `weights`.
"""

import zlib

import numpy as np
import torch

from engine.models.deepseek_v41.config import EngramConfig, V41Config
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.quantize import Q4, Q8, decode_blocks, encode_blocks, fake
from engine.models.deepseek_v41.weights import (
    AttentionWeights,
    CompressorWeights,
    DsparkWeights,
    EngramWeights,
    ExpertWeights,
    HeadMixWeights,
    IndexerWeights,
    IndexKeyWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
    Weights,
)


def random_weights(config: V41Config, seed: int, dtype: torch.dtype) -> Weights:
    """Return the weights of a model: float64 is the widening of float32."""
    return _Maker(config, seed, dtype).weights()


def random_tensor(seed: int, name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> torch.Tensor:
    """Return one float32 tensor that is not part of the tree, drawn like those that are."""
    return _Draw(seed, torch.float32).raw(name, shape, spread, mean)


class _Draw:
    """Named draws of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self.dtype = dtype

    def generator(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed, zlib.crc32(name.encode())]))

    def raw(self, name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> torch.Tensor:
        """Return float32 values, about normal. Sums of uniforms: exact arithmetic on every platform."""
        generator = self.generator(name)
        total = np.zeros(shape)
        for _ in range(4):
            total += generator.random(shape)
        return torch.from_numpy(((total - 2) * (spread * 3**0.5) + mean).astype(np.float32))

    def single(self, name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> torch.Tensor:
        """Return values as kept in float32."""
        return self.raw(name, shape, spread, mean).to(self.dtype)

    def half(self, name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> torch.Tensor:
        """Return values as kept in bfloat16."""
        return self.raw(name, shape, spread, mean).bfloat16().to(self.dtype)

    def norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.half(name, shape, 0.1, 1.0)

    def plain(self, name: str, out: int, inner: int) -> torch.Tensor:
        """Return a linear kept in bfloat16."""
        return self.half(name, (out, inner), inner**-0.5)

    def dense(self, name: str, out: int, inner: int, block: tuple[int, int]) -> torch.Tensor:
        """Return a linear kept in e4m3 blocks."""
        weight = self.raw(name, (out, inner), inner**-0.5)
        return decode_blocks(*encode_blocks(weight, block), block).to(self.dtype)


class _Maker:
    """Builds the tree of weights of one configuration."""

    def __init__(self, config: V41Config, seed: int, dtype: torch.dtype) -> None:
        self._config = config
        self._draw = _Draw(seed, dtype)

    def weights(self) -> Weights:
        config, draw = self._config, self._draw
        vocab, hidden, hc = config.vocab_size, config.hidden_size, config.mhc.mult
        head_mix: HeadMixWeights | None = None
        if not config.mhc.pre_from_prev:
            head_mix = HeadMixWeights(
                draw.single("head_mix.fn", (hc, hc * hidden), 0.5 * (hc * hidden) ** -0.5),
                draw.single("head_mix.base", (hc,), 0.5),
                draw.single("head_mix.scale", (1,), 0.3, 1.0),
            )
        return Weights(
            embed=draw.half("embed", (vocab, hidden), 1.0),
            head=draw.plain("head", vocab, hidden),
            norm=draw.norm("norm", (hidden,)),
            layers=tuple(self._backbone_layer(plan) for plan in config.layers),
            head_mix=head_mix,
            dspark=None if config.dspark is None else self._dspark(),
        )

    def _dense(self, name: str, out: int, inner: int) -> torch.Tensor:
        return self._draw.dense(name, out, inner, self._config.quant.block)

    def _backbone_layer(self, plan: LayerPlan) -> LayerWeights:
        config, name = self._config, f"layers.{plan.index}"
        engram: EngramWeights | None = None
        if plan.has_engram:
            assert config.engram is not None
            engram = self._engram(name, config.engram, config.engram.layers.index(plan.index))
        return self._layer(name, plan, config.moe.num_experts, engram)

    def _layer(self, name: str, plan: LayerPlan, num_experts: int, engram: EngramWeights | None) -> LayerWeights:
        hidden = self._config.hidden_size
        return LayerWeights(
            attn_norm=self._draw.norm(f"{name}.attn_norm", (hidden,)),
            ffn_norm=self._draw.norm(f"{name}.ffn_norm", (hidden,)),
            hc_attn=self._mix(f"{name}.hc_attn"),
            hc_ffn=self._mix(f"{name}.hc_ffn"),
            attn=self._attention(name, plan),
            moe=self._moe(name, plan, num_experts),
            engram=engram,
        )

    def _mix(self, name: str) -> MixWeights:
        hc, draw = self._config.mhc.mult, self._draw
        wide, out = hc * self._config.hidden_size, (2 + hc) * hc
        return MixWeights(
            draw.single(f"{name}.fn", (out, wide), 0.5 * wide**-0.5),
            draw.single(f"{name}.base", (out,), 0.5),
            draw.single(f"{name}.scale", (3,), 0.3, 1.0),
        )

    def _attention(self, name: str, plan: LayerPlan) -> AttentionWeights:
        config, draw, hidden = self._config, self._draw, self._config.hidden_size
        wide, groups, lora = config.num_heads * config.head_dim, config.o_groups, config.o_lora_rank
        index_dim = config.index.head_dim
        index_key: IndexKeyWeights | None = None
        if plan.owns_index_keys and not config.index.own_compressor:
            index_key = IndexKeyWeights(
                draw.plain(f"{name}.wk", index_dim, config.head_dim), draw.norm(f"{name}.k_norm", (index_dim,))
            )
        return AttentionWeights(
            wq_a=self._dense(f"{name}.wq_a", config.q_lora_rank, hidden),
            q_norm=draw.norm(f"{name}.q_norm", (config.q_lora_rank,)),
            wq_b=self._dense(f"{name}.wq_b", wide, config.q_lora_rank),
            wkv=self._dense(f"{name}.wkv", config.head_dim, hidden),
            kv_norm=draw.norm(f"{name}.kv_norm", (config.head_dim,)),
            sink=draw.single(f"{name}.sink", (config.num_heads,), 1.0),
            wo_a=self._dense(f"{name}.wo_a", groups * lora, wide // groups).view(groups, lora, wide // groups),
            wo_b=self._dense(f"{name}.wo_b", hidden, groups * lora),
            compressor=self._compressor(f"{name}.compressor", plan, config.head_dim) if plan.owns_kv else None,
            index_key=index_key,
            indexer=self._indexer(name, plan) if plan.owns_index_query else None,
        )

    def _compressor(self, name: str, plan: LayerPlan, width: int) -> CompressorWeights:
        draw, hidden = self._draw, self._config.hidden_size
        out = width * (2 if plan.overlap else 1)
        return CompressorWeights(
            wkv=draw.plain(f"{name}.wkv", out, hidden),
            wgate=draw.plain(f"{name}.wgate", out, hidden) if plan.m > 1 else None,
            norm=draw.norm(f"{name}.norm", (width,)),
            ape=draw.single(f"{name}.ape", (plan.m, out), 0.5) if self._config.is_v4 else None,
        )

    def _indexer(self, name: str, plan: LayerPlan) -> IndexerWeights:
        config, index = self._config, self._config.index
        own: CompressorWeights | None = None
        if index.own_compressor:
            own = self._compressor(f"{name}.indexer.compressor", plan, index.head_dim)
        return IndexerWeights(
            wq_b=self._dense(f"{name}.indexer.wq_b", index.num_heads * index.head_dim, config.q_lora_rank),
            weights_proj=self._draw.plain(f"{name}.weights_proj", index.num_heads, config.hidden_size),
            compressor=own,
        )

    def _moe(self, name: str, plan: LayerPlan, experts: int) -> MoeWeights:
        config, draw = self._config, self._draw
        hidden, inner = config.hidden_size, config.moe.inner_size
        table: torch.Tensor | None = None
        if plan.hash_routed:
            orders = draw.generator(f"{name}.token_experts").random((config.vocab_size, experts)).argsort(1)
            table = torch.from_numpy(orders[:, : config.moe.top_k].astype(np.int64))
        return MoeWeights(
            gate=draw.plain(f"{name}.gate", experts, hidden),
            bias=None if plan.hash_routed else draw.single(f"{name}.bias", (experts,), 0.05),
            bias_vl=draw.single(f"{name}.bias_vl", (experts,), 0.05) if config.moe.image_bias else None,
            token_experts=table,
            w13=self._experts(f"{name}.w13", experts, 2 * inner, hidden),
            w2=self._experts(f"{name}.w2", experts, hidden, inner),
            shared=ExpertWeights(
                torch.cat([self._dense(f"{name}.shared.{part}", inner, hidden) for part in ("w1", "w3")]),
                self._dense(f"{name}.shared.w2", hidden, inner),
            ),
        )

    def _experts(self, name: str, experts: int, out: int, inner: int) -> torch.Tensor:
        stacked = torch.empty(experts, out, inner, dtype=self._draw.dtype)
        for expert in range(experts):
            if self._config.quant.expert_dtype == "fp4":
                stacked[expert] = fake(Q4(32), self._draw.raw(f"{name}.{expert}", (out, inner), inner**-0.5))
            else:
                stacked[expert] = self._dense(f"{name}.{expert}", out, inner)
        return stacked

    def _engram(self, name: str, config: EngramConfig, number: int) -> EngramWeights:
        hidden, hc, draw = self._config.hidden_size, self._config.mhc.mult, self._draw
        codes, scales = Q8(32).encode(draw.raw(f"{name}.engram", (config.num_rows[number], config.head_dim), 1.0))
        return EngramWeights(
            codes=codes,
            scales=scales,
            wkv=self._dense(f"{name}.engram.wkv", (hc + 1) * hidden, config.num_columns * config.head_dim),
            q_weight=draw.norm(f"{name}.engram.q_weight", (hc, hidden)),
            k_weight=draw.norm(f"{name}.engram.k_weight", (hc, hidden)),
        )

    def _dspark(self) -> DsparkWeights:
        config, draw = self._config, self._draw
        assert config.dspark is not None
        dspark, vocab, hidden = config.dspark, config.vocab_size, config.hidden_size
        rank = dspark.markov_rank
        return DsparkWeights(
            main_proj=self._dense("mtp.main_proj", hidden, len(dspark.target_layers) * hidden),
            main_norm=draw.norm("mtp.main_norm", (hidden,)),
            stages=tuple(
                self._layer(f"mtp.{i}", plan, dspark.num_experts, None) for i, plan in enumerate(config.stages)
            ),
            norm=draw.norm("mtp.norm", (hidden,)),
            markov_embed=draw.half("mtp.markov_embed", (vocab, rank), 1.0),
            markov_head=draw.plain("mtp.markov_head", vocab, rank),
            confidence=draw.plain("mtp.confidence", 1, hidden + rank)[0],
        )
