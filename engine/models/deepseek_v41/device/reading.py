"""Reads a checkpoint into the parts that kernels take, tensor by tensor, straight to a device; nothing is dequantized.

Host memory holds one tensor at a time (experts of one layer while they are arranged). N-gram tables go to the device, or
stay where they are, pinned, if they are told to.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.kernels.reference.formats import thirds, tiled
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
from engine.models.deepseek_v41.packed import read_experts, read_linear
from engine.models.deepseek_v41.tensors import Tensors, TensorSource

_TILE = 128
"""Widths of expert weights are padded to whole tiles of the grouped products; padding is zero."""


def read_parts(
    source: TensorSource,
    config: V41Config,
    device: torch.device,
    token_map: torch.Tensor | None = None,
    *,
    tables_on_host: bool = False,
) -> ModelParts:
    """Return the text model of a source that has the tensors of the configuration's inventory.

    `token_map` int64 [V] for models with n-gram tables. Raises `CheckpointError` naming a tensor that is wrong.
    """
    return _Reader(source, config, device, token_map, tables_on_host=tables_on_host).parts()


class _Reader:
    def __init__(
        self,
        source: TensorSource,
        config: V41Config,
        device: torch.device,
        token_map: torch.Tensor | None,
        *,
        tables_on_host: bool,
    ) -> None:
        self._source = source
        self._config = config
        self._device = device
        self._wide = Tensors(source, torch.float32, config.quant.block)
        self._tables_on_host = tables_on_host
        self._token_map = token_map
        self._hash = NgramHash(config.engram, token_map) if config.engram and token_map is not None else None

    def parts(self) -> ModelParts:
        config = self._config
        return ModelParts(
            embed=self._half("embed.weight"),
            head=self._half("head.weight"),
            norm=self._float("norm.weight"),
            token_map=None if self._token_map is None else self._token_map.to(self._device),
            layers=tuple(self._layer(f"layers.{p.index}", p, config.moe.num_experts) for p in config.layers),
            draft=self._draft() if config.dspark is not None else None,
        )

    def _half(self, name: str) -> torch.Tensor:
        return self._wide.plain(name).bfloat16().to(self._device)

    def _float(self, name: str) -> torch.Tensor:
        return self._wide.plain(name).to(self._device)

    def _dense(self, *names: str, groups: int = 1) -> Dense:
        packed = read_linear(self._source, names, self._config.quant.block)
        codes, scales = (part.unflatten(0, (groups, -1)).contiguous() for part in (packed.codes, packed.scales))
        return Dense(codes.to(self._device), scales.to(self._device))

    def _mix(self, at: str) -> Mix:
        fn, base, scale = (self._wide.float(f"{at}_{part}").to(self._device) for part in ("fn", "base", "scale"))
        return Mix(thirds(fn), scale, base)

    def _layer(self, at: str, plan: LayerPlan, num_experts: int) -> LayerParts:
        return LayerParts(
            attn_norm=self._float(f"{at}.attn_norm.weight"),
            ffn_norm=self._float(f"{at}.ffn_norm.weight"),
            mix_attn=self._mix(f"{at}.hc_attn"),
            mix_ffn=self._mix(f"{at}.hc_ffn"),
            attn=self._attention(f"{at}.attn", plan),
            moe=self._moe(f"{at}.ffn", num_experts),
            engram=self._engram(f"{at}.engram", plan) if plan.has_engram else None,
        )

    def _attention(self, at: str, plan: LayerPlan) -> AttentionParts:
        return AttentionParts(
            wqkv=self._dense(f"{at}.wq_a", f"{at}.wkv"),
            q_norm=self._float(f"{at}.q_norm.weight"),
            wq_b=self._dense(f"{at}.wq_b"),
            kv_norm=self._float(f"{at}.kv_norm.weight"),
            sink=self._wide.float(f"{at}.attn_sink").to(self._device),
            wo_a=self._dense(f"{at}.wo_a", groups=self._config.o_groups),
            wo_b=self._dense(f"{at}.wo_b"),
            pooling=self._pooling(at, plan) if plan.owns_kv else None,
            asking=self._asking(f"{at}.indexer") if plan.owns_index_query else None,
        )

    def _pooling(self, at: str, plan: LayerPlan) -> Pooling:
        names = ("wkv",) if plan.m == 1 else ("wkv", "wgate")
        return Pooling(
            weight=torch.cat([self._half(f"{at}.compressor.{name}.weight") for name in names]),
            norm=self._float(f"{at}.compressor.norm.weight"),
            wk=self._half(f"{at}.indexer.wk.weight"),
            key_norm=self._float(f"{at}.indexer.k_norm.weight"),
        )

    def _asking(self, at: str) -> Asking:
        # A power of two (`check_supported`), so that the weights hold it exactly.
        scale = (self._config.index.head_dim * self._config.index.num_heads) ** -0.5
        return Asking(self._dense(f"{at}.wq_b"), self._half(f"{at}.weights_proj.weight") * scale)

    def _moe(self, at: str, num_experts: int) -> MoeParts:
        config = self._config
        packed = read_experts(self._source, at, range(num_experts), config)
        inner = config.moe.inner_size
        missing = -inner % _TILE
        w13, w13_scales = (_padded_halves(part, inner, missing) for part in (packed.w13, packed.w13_scales))
        w2 = functional.pad(packed.w2, (0, missing // 2))
        w2_scales = functional.pad(packed.w2_scales, (0, missing // 32), value=_ONE)
        bias = self._wide.float(f"{at}.gate.bias")
        image = self._wide.float(f"{at}.gate.bias_vl") if config.moe.image_bias else bias
        shared = f"{at}.shared_experts"
        return MoeParts(
            gate=self._half(f"{at}.gate.weight"),
            bias=torch.stack((bias, image)).to(self._device),
            w13=self._experts(w13, w13_scales),
            w2=self._experts(w2, w2_scales),
            shared_w13=self._dense(f"{shared}.w1", f"{shared}.w3"),
            shared_w2=self._dense(f"{shared}.w2"),
        )

    def _experts(self, packed: torch.Tensor, scales: torch.Tensor) -> Shards:
        words, spread = tiled(packed.to(self._device), scales.to(self._device))
        return shards_of([words], [spread], self._device)

    def _engram(self, at: str, plan: LayerPlan) -> EngramParts:
        assert self._hash is not None
        assert self._config.engram is not None
        number = self._config.engram.layers.index(plan.index)
        table = [self._table(f"{at}.embed.{part}") for part in ("weight", "scale")]
        multipliers, primes, offsets, pad = self._hash.columns(number)
        weight = self._wide.plain(f"{at}.q_weight") * self._wide.plain(f"{at}.k_weight")
        return EngramParts(
            table=shards_of(table[:1], table[1:], self._device),
            columns=NgramColumns(multipliers.to(self._device), primes.to(self._device), offsets.to(self._device), pad),
            wkv=self._dense(f"{at}.wkv"),
            weight=weight.to(self._device),
        )

    def _table(self, name: str) -> torch.Tensor:
        found = self._wide.raw(name)
        if not self._tables_on_host:
            return found.to(self._device)
        return found.contiguous() if self._device.type == "cpu" else found.pin_memory()

    def _draft(self) -> DraftParts:
        config = self._config
        assert config.dspark is not None
        last = f"mtp.{config.dspark.num_stages - 1}"
        return DraftParts(
            main_proj=self._dense("mtp.0.main_proj"),
            main_norm=self._float("mtp.0.main_norm.weight"),
            stages=tuple(self._layer(f"mtp.{i}", p, config.dspark.num_experts) for i, p in enumerate(config.stages)),
            norm=self._float(f"{last}.norm.weight"),
            markov_embed=self._half(f"{last}.markov_head.embed.weight"),
            markov_head=self._half(f"{last}.markov_head.head.weight"),
            confidence=self._float(f"{last}.confidence_head.proj.weight")[0],
        )


_ONE = 127
"""e8m0 code of one."""


def _padded_halves(stacked: torch.Tensor, inner: int, missing: int) -> torch.Tensor:
    """Return [E, 2 (I + missing), n] of codes or scales [E, 2 I, n]: rows of zeros behind gates and behind the others.

    Zero codes need no particular scale, and a scale of code 0 is a power of two like any other.
    """
    if not missing:
        return stacked
    halves: Sequence[torch.Tensor] = (stacked[:, :inner], stacked[:, inner:])
    return torch.cat([functional.pad(half, (0, 0, 0, missing)) for half in halves], 1)
