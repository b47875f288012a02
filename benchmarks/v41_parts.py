"""Random packed weights of a V4.1 shape, drawn on the device they are for: for times, not for texts.

Sizes of values are those of a trained model's (products near one, norms around one), so that no kernel sees only zeros or
infinities.
"""

import torch

from benchmarks.kernel_cases_v41 import e4m3_weight
from engine.kernels.reference.formats import thirds
from engine.kernels.shards import NgramColumns, Shards, shards_of
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.parts import (
    Asking,
    AttentionParts,
    Dense,
    DraftParts,
    EngramParts,
    LayerParts,
    Mix,
    ModelParts,
    MoeParts,
    Pooling,
)
from engine.models.deepseek_v41.engram_hash import NgramHash
from engine.models.deepseek_v41.layer_map import LayerPlan


class RandomParts:
    """Draws the parts of one configuration."""

    def __init__(self, config: V41Config, device: torch.device, seed: int = 1) -> None:
        self._config = config
        self._g = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._map = None
        if config.engram is not None:
            self._map = torch.arange(config.vocab_size) % config.engram.compressed_vocab_size
            self._hash = NgramHash(config.engram, self._map)

    def model(self) -> ModelParts:
        """Return the text model with its draft stages."""
        config = self._config
        return ModelParts(
            embed=self._half(config.vocab_size, config.hidden_size, spread=1.0),
            head=self._half(config.vocab_size, config.hidden_size),
            norm=self._norm(config.hidden_size),
            token_map=None if self._map is None else self._map.to(self._device),
            layers=tuple(self._layer(plan, config.moe.num_experts) for plan in config.layers),
            draft=None if config.dspark is None else self._draft(),
        )

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._g, device=self._device)

    def _half(self, out: int, inner: int, spread: float | None = None) -> torch.Tensor:
        return (self._randn(out, inner) * (inner**-0.5 if spread is None else spread)).bfloat16()

    def _norm(self, *shape: int) -> torch.Tensor:
        return 1 + 0.1 * self._randn(*shape)

    def _dense(self, out: int, inner: int, groups: int = 1) -> Dense:
        return Dense(*e4m3_weight(self._g, groups, out, inner))

    def _mix(self) -> Mix:
        hc = self._config.mhc.mult
        wide = hc * self._config.hidden_size
        fn = self._randn((2 + hc) * hc, wide) * (0.5 * wide**-0.5)
        return Mix(thirds(fn), self._norm(3), 0.5 * self._randn((2 + hc) * hc))

    def _layer(self, plan: LayerPlan, experts: int) -> LayerParts:
        width = self._config.hidden_size
        return LayerParts(
            attn_norm=self._norm(width),
            ffn_norm=self._norm(width),
            mix_attn=self._mix(),
            mix_ffn=self._mix(),
            attn=self._attention(plan),
            moe=self._moe(experts),
            engram=self._engram(plan) if plan.has_engram else None,
        )

    def _attention(self, plan: LayerPlan) -> AttentionParts:
        config = self._config
        width, wide = config.hidden_size, config.num_heads * config.head_dim
        pooling = asking = None
        if plan.owns_kv:
            pooling = Pooling(
                self._half(config.head_dim * (2 if plan.m > 1 else 1), width),
                self._norm(config.head_dim),
                self._half(config.index.head_dim, config.head_dim),
                self._norm(config.index.head_dim),
            )
        if plan.owns_index_query:
            index = config.index
            asking = Asking(
                self._dense(index.num_heads * index.head_dim, config.q_lora_rank),
                self._half(index.num_heads, width) / 64,
            )
        return AttentionParts(
            wqkv=self._dense(config.q_lora_rank + config.head_dim, width),
            q_norm=self._norm(config.q_lora_rank),
            wq_b=self._dense(wide, config.q_lora_rank),
            kv_norm=self._norm(config.head_dim),
            sink=self._randn(config.num_heads),
            wo_a=self._dense(config.o_lora_rank, wide // config.o_groups, config.o_groups),
            wo_b=self._dense(width, config.o_groups * config.o_lora_rank),
            pooling=pooling,
            asking=asking,
        )

    def _tiles(self, experts: int, out: int, inner: int) -> Shards:
        """Return tiled weights: any words and middling scales are some weight."""
        tiles = (experts, out // 64, inner // 128)
        words = torch.randint(
            -(2**31), 2**31, (*tiles, 64, 16), dtype=torch.int32, generator=self._g, device=self._device
        )
        low = 124 - int(inner).bit_length() // 2
        shape = (*tiles, 64, 4)
        scales = torch.randint(low, low + 3, shape, dtype=torch.uint8, generator=self._g, device=self._device)
        return shards_of([words], [scales], self._device)

    def _moe(self, experts: int) -> MoeParts:
        width, inner = self._config.hidden_size, self._config.moe.inner_size
        padded = -(-inner // 128) * 128
        return MoeParts(
            self._half(experts, width),
            0.05 * self._randn(2, experts),
            self._tiles(experts, 2 * padded, width),
            self._tiles(experts, width, padded),
            shared_w13=self._dense(2 * inner, width),
            shared_w2=self._dense(width, inner),
        )

    def _engram(self, plan: LayerPlan) -> EngramParts:
        config, engram = self._config, self._config.engram
        assert engram is not None
        number = engram.layers.index(plan.index)
        rows = engram.num_rows[number]
        codes = self._randn(rows, engram.head_dim).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.full((rows, engram.head_dim // 32), 126, dtype=torch.uint8, device=self._device)
        multipliers, primes, offsets, pad = self._hash.columns(number)
        hc, width = config.mhc.mult, config.hidden_size
        return EngramParts(
            shards_of([codes], [scales], self._device),
            NgramColumns(multipliers.to(self._device), primes.to(self._device), offsets.to(self._device), pad),
            self._dense((hc + 1) * width, engram.num_columns * engram.head_dim),
            self._norm(hc, width),
        )

    def _draft(self) -> DraftParts:
        config = self._config
        assert config.dspark is not None
        width, rank = config.hidden_size, config.dspark.markov_rank
        return DraftParts(
            main_proj=self._dense(width, len(config.dspark.target_layers) * width),
            main_norm=self._norm(width),
            stages=tuple(self._layer(plan, config.dspark.num_experts) for plan in config.stages),
            norm=self._norm(width),
            markov_embed=self._half(config.vocab_size, rank, spread=1.0),
            markov_head=self._half(config.vocab_size, rank),
            confidence=self._half(1, width + rank)[0].float(),
        )
