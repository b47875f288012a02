"""Weights of our own tree as the tensors of a checkpoint: the inverse of the loader. Knows no files.

Values that their published format does not hold exactly are rounded to it.
"""

from collections.abc import Iterator
from itertools import chain

import torch

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.formats import pack_nibbles
from engine.models.deepseek_v41.quantize import Q4, encode_blocks
from engine.models.deepseek_v41.weights import (
    AttentionWeights,
    CompressorWeights,
    DsparkWeights,
    EngramWeights,
    HeadMixWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
    Weights,
)

Named = Iterator[tuple[str, torch.Tensor]]


def published(weights: Weights, config: V41Config) -> Named:
    """Yield name and tensor of everything in the text model, in published types, a layer at a time."""
    return _Publisher(config).weights(weights)


class _Publisher:
    def __init__(self, config: V41Config) -> None:
        self._config = config

    def weights(self, weights: Weights) -> Named:
        yield from _plain("embed.weight", weights.embed)
        for plan, layer in zip(self._config.layers, weights.layers, strict=True):
            yield from self._block(f"layers.{plan.index}", layer)
        yield from _plain("norm.weight", weights.norm)
        yield from _plain("head.weight", weights.head)
        if weights.head_mix is not None:
            yield from _mix("hc_head", weights.head_mix)
        if weights.dspark is not None:
            yield from self._dspark(weights.dspark)

    def _linear(self, name: str, weight: torch.Tensor) -> Named:
        codes, scales = encode_blocks(weight, self._config.quant.block)
        yield f"{name}.weight", codes.view(torch.float8_e4m3fn)
        yield f"{name}.scale", scales.view(torch.float8_e8m0fnu)

    def _expert(self, name: str, weight: torch.Tensor) -> Named:
        if self._config.quant.expert_dtype != "fp4":
            yield from self._linear(name, weight)
            return
        codes, scales = Q4(32).encode(weight)
        yield f"{name}.weight", pack_nibbles(codes).view(torch.int8)
        yield f"{name}.scale", scales.view(torch.float8_e8m0fnu)

    def _block(self, at: str, layer: LayerWeights) -> Named:
        yield from _plain(f"{at}.attn_norm.weight", layer.attn_norm)
        yield from _plain(f"{at}.ffn_norm.weight", layer.ffn_norm)
        yield from _mix(f"{at}.hc_attn", layer.hc_attn)
        yield from _mix(f"{at}.hc_ffn", layer.hc_ffn)
        yield from self._attention(f"{at}.attn", layer.attn)
        yield from self._moe(f"{at}.ffn", layer.moe)
        if layer.engram is not None:
            yield from self._engram(f"{at}.engram", layer.engram)

    def _attention(self, at: str, attn: AttentionWeights) -> Named:
        yield f"{at}.attn_sink", attn.sink.float()
        yield from self._linear(f"{at}.wq_a", attn.wq_a)
        yield from _plain(f"{at}.q_norm.weight", attn.q_norm)
        yield from self._linear(f"{at}.wq_b", attn.wq_b)
        yield from self._linear(f"{at}.wkv", attn.wkv)
        yield from _plain(f"{at}.kv_norm.weight", attn.kv_norm)
        yield from self._linear(f"{at}.wo_a", attn.wo_a.flatten(0, 1))
        yield from self._linear(f"{at}.wo_b", attn.wo_b)
        if attn.compressor is not None:
            yield from _compressor(f"{at}.compressor", attn.compressor)
        if attn.index_key is not None:
            yield from _plain(f"{at}.indexer.k_norm.weight", attn.index_key.norm)
            yield from _plain(f"{at}.indexer.wk.weight", attn.index_key.wk)
        if attn.indexer is not None:
            yield from self._indexer(f"{at}.indexer", attn.indexer)

    def _indexer(self, at: str, indexer: IndexerWeights) -> Named:
        yield from self._linear(f"{at}.wq_b", indexer.wq_b)
        yield from _plain(f"{at}.weights_proj.weight", indexer.weights_proj)
        if indexer.compressor is not None:
            yield from _compressor(f"{at}.compressor", indexer.compressor)

    def _moe(self, at: str, moe: MoeWeights) -> Named:
        inner = self._config.moe.inner_size
        yield from _plain(f"{at}.gate.weight", moe.gate)
        if moe.token_experts is not None:
            yield f"{at}.gate.tid2eid", moe.token_experts
        for name, bias in (("bias", moe.bias), ("bias_vl", moe.bias_vl)):
            if bias is not None:
                yield f"{at}.gate.{name}", bias.float()
        for e in range(moe.w13.shape[0]):
            yield from self._expert(f"{at}.experts.{e}.w1", moe.w13[e, :inner])
            yield from self._expert(f"{at}.experts.{e}.w3", moe.w13[e, inner:])
            yield from self._expert(f"{at}.experts.{e}.w2", moe.w2[e])
        yield from self._linear(f"{at}.shared_experts.w1", moe.shared.w13[:inner])
        yield from self._linear(f"{at}.shared_experts.w3", moe.shared.w13[inner:])
        yield from self._linear(f"{at}.shared_experts.w2", moe.shared.w2)

    def _engram(self, at: str, engram: EngramWeights) -> Named:
        yield f"{at}.embed.weight", engram.codes.view(torch.float8_e4m3fn)
        yield f"{at}.embed.scale", engram.scales.view(torch.float8_e8m0fnu)
        yield from self._linear(f"{at}.wkv", engram.wkv)
        yield from _plain(f"{at}.q_weight", engram.q_weight)
        yield from _plain(f"{at}.k_weight", engram.k_weight)

    def _dspark(self, dspark: DsparkWeights) -> Named:
        for i, stage in enumerate(dspark.stages):
            yield from self._block(f"mtp.{i}", stage)
        yield from self._linear("mtp.0.main_proj", dspark.main_proj)
        last = f"mtp.{len(dspark.stages) - 1}"
        yield from chain(
            _plain("mtp.0.main_norm.weight", dspark.main_norm),
            _plain(f"{last}.norm.weight", dspark.norm),
            _plain(f"{last}.markov_head.embed.weight", dspark.markov_embed),
            _plain(f"{last}.markov_head.head.weight", dspark.markov_head),
            _plain(f"{last}.confidence_head.proj.weight", dspark.confidence[None]),
        )


def _plain(name: str, tensor: torch.Tensor) -> Named:
    yield name, tensor.to(torch.bfloat16)


def _mix(at: str, mix: MixWeights | HeadMixWeights) -> Named:
    yield f"{at}_fn", mix.fn.float()
    yield f"{at}_base", mix.base.float()
    yield f"{at}_scale", mix.scale.float()


def _compressor(at: str, compressor: CompressorWeights) -> Named:
    if compressor.ape is not None:
        yield f"{at}.ape", compressor.ape.float()
    yield from _plain(f"{at}.norm.weight", compressor.norm)
    yield from _plain(f"{at}.wkv.weight", compressor.wkv)
    if compressor.wgate is not None:
        yield from _plain(f"{at}.wgate.weight", compressor.wgate)
