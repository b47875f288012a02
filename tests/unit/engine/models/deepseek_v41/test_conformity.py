"""Our blocks against Transformers' `deepseek_v4`, layer kind by layer kind.

Rates 2 and 1 of V4.1 are an HCA layer of that rate without position bias and with every entry selected.
"""

import msgspec
import pytest
import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.layer_map import FULL, WINDOW, LayerPlan
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.reference import Reference
from engine.models.deepseek_v41.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    HeadMixWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
    Weights,
)

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
pytestmark = pytest.mark.filterwarnings("default")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
}
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LENGTH = 75
TOLERANCE = 3e-6


def their_model(layer_types, rates, num_hash_layers):
    config = transformers.DeepseekV4Config(
        **SIZES,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        compress_rates=rates,
        num_hash_layers=num_hash_layers,
        rope_parameters={"rope_type": "yarn", **YARN},
        pad_token_id=None,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        with torch.no_grad():
            _redraw(name, tensor, hca_without_bias=rates[HCA] <= 2)
    return model


def _redraw(name, tensor, *, hca_without_bias):
    """Give every part a value that matters; zeros and ones would hide faults."""
    if "inv_freq" in name:
        return
    if "tid2eid" in name:
        tensor.copy_(torch.rand(tensor.shape[0], SIZES["n_routed_experts"]).argsort(1)[:, : tensor.shape[1]])
    elif "position_bias" in name:
        tensor.zero_() if hca_without_bias else tensor.normal_(0, 0.5)
    elif name.endswith(("base", "sinks", "e_score_correction_bias", "hc_base")):
        tensor.normal_(0, {"sinks": 1.0, "bias": 0.05}.get(name.rsplit(".", 1)[1].rsplit("_", 1)[-1], 0.5))
    elif name.endswith("scale"):
        tensor.normal_(1, 0.3)
    elif name.endswith("fn"):
        tensor.normal_(0, 0.5 * tensor.shape[-1] ** -0.5)
    elif "norm" in name:
        tensor.normal_(1, 0.1)
    elif "embed" in name:
        tensor.normal_(0, 1)
    else:
        tensor.normal_(0, tensor.shape[-1] ** -0.5)


def our_config(layer_types, rates, num_hash_layers):
    """Read V4's flat configuration, then put the rates of the test in place of the published ones."""
    config = parse_config(
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **SIZES,
            "num_hidden_layers": len(layer_types),
            "compress_ratios": [{SLIDING: 0, CSA: 4, HCA: 128}[kind] for kind in layer_types],
            "num_hash_layers": num_hash_layers,
            "rope_scaling": {"type": "yarn", **YARN},
            "expert_dtype": "fp4",
            "quantization_config": {"weight_block_size": [128, 128]},
            "eos_token_id": 1,
        }
    )
    return msgspec.structs.replace(
        config, layers=tuple(_plan(i, kind, rates, num_hash_layers) for i, kind in enumerate(layer_types))
    )


def _plan(i, kind, rates, num_hash_layers):
    hashed = i < num_hash_layers
    if kind == SLIDING:
        return LayerPlan(index=i, mode=WINDOW, m=0, hash_routed=hashed)
    source = i if kind == CSA else None
    return LayerPlan(
        index=i, mode=FULL, m=rates[kind], kv_source=i, index_source=source, hash_routed=hashed, rope="compress",
        overlap=kind == CSA,
    )  # fmt: skip


def our_weights(model, config):
    base = model.model
    head = base.hc_head
    return Weights(
        embed=base.embed_tokens.weight.data,
        head=model.lm_head.weight.data,
        norm=base.norm.weight.data,
        layers=tuple(_layer(theirs, plan) for theirs, plan in zip(base.layers, config.layers, strict=True)),
        head_mix=HeadMixWeights(head.hc_fn.data, head.hc_base.data, head.hc_scale.data),
    )


def _mix(theirs):
    return MixWeights(theirs.fn.data, theirs.base.data, theirs.scale.data)


def _compressor(theirs, m):
    alone = m == 1
    return CompressorWeights(
        wkv=theirs.kv_proj.weight.data,
        wgate=None if alone else theirs.gate_proj.weight.data,
        norm=theirs.kv_norm.weight.data,
        ape=None if alone else theirs.position_bias.data,
    )


def _layer(theirs, plan):
    attn, mlp = theirs.self_attn, theirs.mlp
    groups, lora = SIZES["o_groups"], SIZES["o_lora_rank"]
    indexer = None
    if plan.owns_index_query:
        own = attn.compressor.indexer
        indexer = IndexerWeights(
            own.q_b_proj.weight.data, own.scorer.weights_proj.weight.data, _compressor(own, plan.m)
        )
    shared = mlp.shared_experts
    return LayerWeights(
        attn_norm=theirs.input_layernorm.weight.data,
        ffn_norm=theirs.post_attention_layernorm.weight.data,
        hc_attn=_mix(theirs.attn_hc),
        hc_ffn=_mix(theirs.ffn_hc),
        attn=AttentionWeights(
            wq_a=attn.q_a_proj.weight.data,
            q_norm=attn.q_a_norm.weight.data,
            wq_b=attn.q_b_proj.weight.data,
            wkv=attn.kv_proj.weight.data,
            kv_norm=attn.kv_norm.weight.data,
            sink=attn.sinks.data,
            wo_a=attn.o_a_proj.weight.data.view(groups, lora, -1),
            wo_b=attn.o_b_proj.weight.data,
            compressor=_compressor(attn.compressor, plan.m) if plan.m else None,
            indexer=indexer,
        ),
        moe=MoeWeights(
            gate=mlp.gate.weight.data,
            bias=None if plan.hash_routed else mlp.gate.e_score_correction_bias,
            bias_vl=None,
            token_experts=mlp.gate.tid2eid if plan.hash_routed else None,
            w13=mlp.experts.gate_up_proj.data,
            w2=mlp.experts.down_proj.data,
            shared=ExpertWeights(
                torch.cat((shared.gate_proj.weight.data, shared.up_proj.weight.data)), shared.down_proj.weight.data
            ),
        ),
    )


def our_reference(model, layer_types, rates, num_hash_layers):
    config = our_config(layer_types, rates, num_hash_layers)
    arithmetic = arithmetic_of(config, activations=False, caches=False, quantized_output=False)
    return Reference(config, our_weights(model, config), arithmetic)


def token_ids():
    return torch.randint(0, SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def ours_in_chunks(reference, ids, sizes):
    cache = reference.new_cache()
    cache.extend(ids)
    start, rows = 0, []
    for size in sizes:
        rows.append(reference.forward(cache, start, start + size).logits)
        start += size
    return torch.cat(rows)


LAYERS = {
    "window": (SLIDING, 8),
    "rate 8": (HCA, 8),
    "rate 2": (HCA, 2),
    "rate 1": (HCA, 1),
    "overlapping rate 4 with an indexer": (CSA, 8),
}


@pytest.mark.parametrize("num_hash_layers", [0, 1], ids=["scored experts", "hashed experts"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_block_of_each_kind_equals_the_published_implementation(kind, num_hash_layers):
    layer, hca = LAYERS[kind]
    rates = {CSA: 4, HCA: hca}
    theirs = their_model([layer], rates, num_hash_layers)
    ours = our_reference(theirs, [layer], rates, num_hash_layers)
    ids = token_ids()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        got = ours_in_chunks(ours, ids, [LENGTH])
    assert expected.std() > 0.3
    assert (got - expected).abs().max() < TOLERANCE


DEEP = [SLIDING, SLIDING, CSA, HCA, CSA, HCA]


@pytest.mark.parametrize("sizes", [[LENGTH], [7, 13, 20, 35], [63, 1, 3, 8]], ids=str)
def test_a_deep_model_equals_the_published_implementation_in_any_chunks(sizes):
    rates = {CSA: 4, HCA: 8}
    theirs = their_model(DEEP, rates, 2)
    ours = our_reference(theirs, DEEP, rates, 2)
    ids = token_ids()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        got = ours_in_chunks(ours, ids, sizes)
    # Six layers of float32 add up; single blocks are compared to 3e-6 above.
    assert (got - expected).abs().max() < 1.3e-5


def test_a_wrong_order_of_the_combination_matrix_would_be_seen():
    rates = {CSA: 4, HCA: 8}
    theirs = their_model([SLIDING], rates, 0)
    config = our_config([SLIDING], rates, 0)
    weights = our_weights(theirs, config)
    layer = weights.layers[0]
    hc, rows = 4, torch.arange(24)
    rows[8:] = rows[8:].view(hc, hc).T.flatten()
    swapped = MixWeights(layer.hc_ffn.fn[rows], layer.hc_ffn.base[rows], layer.hc_ffn.scale)
    broken = LayerWeights(layer.attn_norm, layer.ffn_norm, layer.hc_attn, swapped, layer.attn, layer.moe)
    weights = Weights(weights.embed, weights.head, weights.norm, (broken,), weights.head_mix)
    arithmetic = arithmetic_of(config, activations=False, caches=False, quantized_output=False)
    ids = token_ids()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        got = ours_in_chunks(Reference(config, weights, arithmetic), ids, [LENGTH])
    # Embedded streams are all equal: the first sublayer's mixing shows nowhere, the second one's does.
    assert (got - expected).abs().max() > 1e-3
