"""Configurations of the generated models, in the published form: `v41-tiny` for any test, `v41-mini` for one GPU.

Both have every text feature of V4.1 and an image encoder. Knows no tensors.
"""

from typing import Any

_ROOT: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}

_TEXT: dict[str, Any] = {
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_hidden_layers": 14,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 5, 8],
    "index_source_layer_ids": [2, 5, 8, 10, 12],
    "candidate_source_layer_id": 8,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [11, 12, 13],
}
"""What both have in common: the rules of V4.1 and a map of 14 layers with every mode."""


def tiny_config(max_positions: int = 8192) -> dict[str, Any]:
    """Return the config.json of `v41-tiny`: about 6 million parameters in the text part."""
    return {
        **_ROOT,
        "image_token_id": 510,
        "text_config": {
            **_TEXT,
            "vocab_size": 512,
            "hidden_size": 128,
            "moe_intermediate_size": 64,
            "num_attention_heads": 4,
            "head_dim": 64,
            "qk_rope_head_dim": 16,
            "q_lora_rank": 64,
            "o_lora_rank": 32,
            "o_groups": 2,
            "sliding_window": 8,
            "rope_scaling": _yarn(64),
            "max_position_embeddings": max_positions,
            "index_n_heads": 32,
            "index_head_dim": 32,
            "index_topk": 8,
            "candidate_topk_blocks": 4,
            "candidate_block_size": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "engram_num_embeddings": [6126, 6332],
            "engram_vocab_size": 1000,
            "engram_n_heads": 2,
            "engram_head_dim": 32,
            "engram_compressed_vocab_size": 300,
            "dspark_noise_token_id": 511,
            "dspark_markov_rank": 16,
            "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 1,
        },
        "vision_config": _vision(layers=2, hidden=64, heads=4, inner=96, tokens=40, pixels=7056),
    }


def mini_config() -> dict[str, Any]:
    """Return the config.json of `v41-mini`: about 0.45 billion parameters with the head sizes of the real model."""
    return {
        **_ROOT,
        "image_token_id": 32_766,
        "text_config": {
            **_TEXT,
            "vocab_size": 32_768,
            "hidden_size": 1024,
            "moe_intermediate_size": 256,
            "num_attention_heads": 16,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 256,
            "o_lora_rank": 128,
            "o_groups": 8,
            "sliding_window": 128,
            "rope_scaling": _yarn(65_536),
            "max_position_embeddings": 1_048_576,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "candidate_topk_blocks": 128,
            "candidate_block_size": 8,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "engram_num_embeddings": [482_648, 488_250],
            "engram_vocab_size": 20_000,
            "engram_n_heads": 8,
            "engram_head_dim": 64,
            "engram_compressed_vocab_size": 30_000,
            "dspark_noise_token_id": 32_767,
            "dspark_markov_rank": 64,
            "dspark_n_routed_experts": 8,
            "dspark_num_experts_per_tok": 2,
        },
        "vision_config": _vision(layers=2, hidden=256, heads=4, inner=704, tokens=256, pixels=28_224),
    }


def _yarn(original: int) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def _vision(*, layers: int, hidden: int, heads: int, inner: int, tokens: int, pixels: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": tokens,
        "min_pixels": pixels,
        "max_wh_ratio": None,
    }
