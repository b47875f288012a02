"""Reads the weights of a checkpoint directory into our own tree: names mapped, projections fused, experts stacked.

Tensors are converted one by one, so no more than one converted copy of the model exists; the n-gram tables stay
mapped. `linears` that read the same input share storage (`wq_a` lies before `wkv`, `wkv` before `wgate`), so a fused
product costs no copy.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from core.errors import CheckpointError
from engine.models.deepseek_v41.checkpoint import PublishedCheckpoint
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.engram_hash import hash_primes
from engine.models.deepseek_v41.inventory import inventory
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.tensors import Tensors, TensorSource
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

_FIRST_EXPERT = "layers.0.ffn.experts.0.w1.weight"


def open_checkpoint(directory: Path, config: V41Config, *, verify: bool = True) -> PublishedCheckpoint:
    """Open a checkpoint and compare it with the inventory of the configuration; raises `CheckpointError`.

    Whether experts have four or eight bits is decided by their tensors. V4's next-token layers may be there or not.
    """
    _check_tables(config)
    checkpoint = PublishedCheckpoint(directory, verify=verify)
    found = checkpoint.dtype_of(_FIRST_EXPERT)
    if found is not None:
        dtype = "fp8" if found == "F8_E4M3" else "fp4"
        config = replace(config, quant=replace(config.quant, expert_dtype=dtype))
    checkpoint.check(inventory(config), optional=("mtp.",) if config.is_v4 else ())
    return checkpoint


def load_weights(directory: Path, config: V41Config, dtype: torch.dtype, *, verify: bool = True) -> Weights:
    """Return the text model of a directory; raises `CheckpointError` naming the tensor that is wrong."""
    return read_weights(open_checkpoint(directory, config, verify=verify), config, dtype)


def read_weights(source: TensorSource, config: V41Config, dtype: torch.dtype) -> Weights:
    """Return the text model of a source that has the tensors of the configuration's inventory."""
    return _Reader(Tensors(source, dtype, config.quant.block), config).weights()


def _check_tables(config: V41Config) -> None:
    """Refuse tables that have other rows than the hash can name."""
    if config.engram is None:
        return
    rows = tuple(sum(primes) for primes in hash_primes(config.engram))
    if rows != config.engram.num_rows:
        raise CheckpointError(f"engram_num_embeddings is {list(config.engram.num_rows)}, the hash needs {list(rows)}")


class _Reader:
    def __init__(self, tensors: Tensors, config: V41Config) -> None:
        self._tensors = tensors
        self._config = config

    def weights(self) -> Weights:
        config, tensors = self._config, self._tensors
        return Weights(
            embed=tensors.plain("embed.weight"),
            head=tensors.plain("head.weight"),
            norm=tensors.plain("norm.weight"),
            layers=tuple(self._block(f"layers.{p.index}", p, config.moe.num_experts) for p in config.layers),
            head_mix=HeadMixWeights(*self._mix("hc_head")) if config.is_v4 else None,
            dspark=self._dspark() if config.dspark is not None else None,
        )

    def _mix(self, at: str) -> Iterator[torch.Tensor]:
        return (self._tensors.float(f"{at}_{part}") for part in ("fn", "base", "scale"))

    def _block(self, at: str, plan: LayerPlan, num_experts: int) -> LayerWeights:
        tensors = self._tensors
        return LayerWeights(
            attn_norm=tensors.plain(f"{at}.attn_norm.weight"),
            ffn_norm=tensors.plain(f"{at}.ffn_norm.weight"),
            hc_attn=MixWeights(*self._mix(f"{at}.hc_attn")),
            hc_ffn=MixWeights(*self._mix(f"{at}.hc_ffn")),
            attn=self._attention(f"{at}.attn", plan),
            moe=self._moe(f"{at}.ffn", plan, num_experts),
            engram=self._engram(f"{at}.engram") if plan.has_engram else None,
        )

    def _attention(self, at: str, plan: LayerPlan) -> AttentionWeights:
        tensors, config = self._tensors, self._config
        fused = torch.cat((tensors.linear(f"{at}.wq_a"), tensors.linear(f"{at}.wkv")))
        keys = plan.owns_index_keys and not config.index.own_compressor
        return AttentionWeights(
            wq_a=fused[: config.q_lora_rank],
            q_norm=tensors.plain(f"{at}.q_norm.weight"),
            wq_b=tensors.linear(f"{at}.wq_b"),
            wkv=fused[config.q_lora_rank :],
            kv_norm=tensors.plain(f"{at}.kv_norm.weight"),
            sink=tensors.float(f"{at}.attn_sink"),
            wo_a=tensors.linear(f"{at}.wo_a").unflatten(0, (config.o_groups, -1)),
            wo_b=tensors.linear(f"{at}.wo_b"),
            compressor=self._compressor(f"{at}.compressor", plan) if plan.owns_kv else None,
            index_key=self._index_key(f"{at}.indexer") if keys else None,
            indexer=self._indexer(f"{at}.indexer", plan) if plan.owns_index_query else None,
        )

    def _compressor(self, at: str, plan: LayerPlan) -> CompressorWeights:
        tensors = self._tensors
        norm = tensors.plain(f"{at}.norm.weight")
        ape = tensors.float(f"{at}.ape") if self._config.is_v4 else None
        if plan.m == 1:
            return CompressorWeights(tensors.plain(f"{at}.wkv.weight"), None, norm, ape)
        fused = torch.cat((tensors.plain(f"{at}.wkv.weight"), tensors.plain(f"{at}.wgate.weight")))
        wkv, wgate = fused.chunk(2)
        return CompressorWeights(wkv, wgate, norm, ape)

    def _index_key(self, at: str) -> IndexKeyWeights:
        return IndexKeyWeights(self._tensors.plain(f"{at}.wk.weight"), self._tensors.plain(f"{at}.k_norm.weight"))

    def _indexer(self, at: str, plan: LayerPlan) -> IndexerWeights:
        own = self._config.index.own_compressor
        return IndexerWeights(
            wq_b=self._tensors.linear(f"{at}.wq_b"),
            weights_proj=self._tensors.plain(f"{at}.weights_proj.weight"),
            compressor=self._compressor(f"{at}.compressor", plan) if own else None,
        )

    def _moe(self, at: str, plan: LayerPlan, num_experts: int) -> MoeWeights:
        tensors, moe = self._tensors, self._config.moe
        hidden, inner = self._config.hidden_size, moe.inner_size
        w13 = torch.empty(num_experts, 2 * inner, hidden, dtype=tensors.dtype)
        w2 = torch.empty(num_experts, hidden, inner, dtype=tensors.dtype)
        for e in range(num_experts):
            w13[e, :inner] = tensors.expert(f"{at}.experts.{e}.w1")
            w13[e, inner:] = tensors.expert(f"{at}.experts.{e}.w3")
            w2[e] = tensors.expert(f"{at}.experts.{e}.w2")
        shared = f"{at}.shared_experts"
        return MoeWeights(
            gate=tensors.plain(f"{at}.gate.weight"),
            bias=None if plan.hash_routed else tensors.float(f"{at}.gate.bias"),
            bias_vl=tensors.float(f"{at}.gate.bias_vl") if moe.image_bias else None,
            token_experts=self._token_experts(at, num_experts) if plan.hash_routed else None,
            w13=w13,
            w2=w2,
            shared=ExpertWeights(
                torch.cat((tensors.linear(f"{shared}.w1"), tensors.linear(f"{shared}.w3"))),
                tensors.linear(f"{shared}.w2"),
            ),
        )

    def _token_experts(self, at: str, num_experts: int) -> torch.Tensor:
        table = self._tensors.integers(f"{at}.gate.tid2eid")
        if bool(((table < 0) | (table >= num_experts)).any()):
            raise CheckpointError(f"tensor {at}.gate.tid2eid names experts outside 0..{num_experts - 1}")
        return table

    def _engram(self, at: str) -> EngramWeights:
        tensors = self._tensors
        return EngramWeights(
            codes=tensors.raw(f"{at}.embed.weight"),
            scales=tensors.raw(f"{at}.embed.scale"),
            wkv=tensors.linear(f"{at}.wkv"),
            q_weight=tensors.plain(f"{at}.q_weight"),
            k_weight=tensors.plain(f"{at}.k_weight"),
        )

    def _dspark(self) -> DsparkWeights:
        config, tensors = self._config, self._tensors
        assert config.dspark is not None
        last = f"mtp.{config.dspark.num_stages - 1}"
        stages = enumerate(config.stages)
        return DsparkWeights(
            main_proj=tensors.linear("mtp.0.main_proj"),
            main_norm=tensors.plain("mtp.0.main_norm.weight"),
            stages=tuple(self._block(f"mtp.{i}", plan, config.dspark.num_experts) for i, plan in stages),
            norm=tensors.plain(f"{last}.norm.weight"),
            markov_embed=tensors.plain(f"{last}.markov_head.embed.weight"),
            markov_head=tensors.plain(f"{last}.markov_head.head.weight"),
            confidence=tensors.plain(f"{last}.confidence_head.proj.weight")[0],
        )
