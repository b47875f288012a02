"""Which function serves each op for one model on one device: the table's, or the reference where sizes do not fit it.

Knows no weights and no rows.
"""

from dataclasses import dataclass

import torch

from core.errors import ConfigError
from engine.kernels.ops import PROVIDERS, REFERENCE, Op, Provider, pick
from engine.models.deepseek_v41.config import V41Config

_SLICES = 64 * 8
"""What `stream_coefficients` cuts a row of all streams into."""
_KEY = 128
"""Index head dim, and entries per page at least, of the index scan."""
_KEYS_TILE = 64


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of one model."""

    lay_tokens: Op
    lay_entries: Op
    rotary_turns: Op
    gather_ngrams: Op
    rms_quantize: Op
    quantize_rows: Op
    dense_linear: Op
    plain_linear: Op
    mix_streams: Op
    collapse_streams: Op
    stream_coefficients: Op
    turn_heads: Op
    store_window: Op
    commit_ring: Op
    store_entries: Op
    index_queries: Op
    index_scores: Op
    block_scores: Op
    select_top: Op
    block_entries: Op
    sparse_attention: Op
    choose_routes: Op
    sort_routes: Op
    experts_up: Op
    experts_down: Op
    swiglu_quantize: Op
    engram_lookup: Op
    engram_gate: Op
    captured: bool
    """No op waits for the device: references of five ops do."""


def ops_of(
    config: V41Config, page_tokens: int, device: torch.device, providers: tuple[Provider, ...] = PROVIDERS
) -> Ops:
    """Return the ops of a model over pages of so many tokens."""
    per_page = min((page_tokens // layer.m for layer in config.kv_owners), default=_KEY)
    narrow_keys = config.index.head_dim != _KEY or per_page % _KEY != 0
    odd_tiles = config.window % _KEYS_TILE != 0 or config.index.top_k % _KEYS_TILE != 0 or config.num_heads % 16 != 0
    refused = {
        "stream_coefficients": config.mhc.mult * config.hidden_size % _SLICES != 0,
        "index_scores": narrow_keys,
        "block_scores": narrow_keys,
        "sparse_attention": odd_tiles or config.head_dim < 2 * _KEY,
    }

    def of(op: str) -> Op:
        return REFERENCE.load(op) if refused.get(op) else pick(op, device, providers)

    found = {name: of(name) for name in Ops.__dataclass_fields__ if name != "captured"}
    waiting = ("commit_ring", "experts_up", "experts_down", "store_window", "sort_routes")
    is_captured = not any(found[op] is REFERENCE.load(op) for op in waiting)
    return Ops(**found, captured=is_captured)


def _is_power_of_4(n: int) -> bool:
    return n & (n - 1) == 0 and n.bit_length() % 2 == 1


def check_supported(config: V41Config) -> None:
    """Raise `ConfigError` for a model of the family whose forms only the CPU has."""
    reasons = {
        "V4's forms (classic streams, 584-byte rows)": config.is_v4 or not config.mhc.pre_from_prev,
        "experts in eight bits": config.quant.expert_dtype != "fp4",
        "entries in eight bits": not config.quant.fp4_sparse_kv,
        "weight blocks other than 32 x 32": config.quant.block != (32, 32) or config.quant.activation_group != 32,
        "a number of streams other than 4, or of Sinkhorn rounds other than 20": config.mhc.mult != 4
        or config.mhc.sinkhorn_iters != 20,
        "layers routed by token id": any(layer.hash_routed for layer in config.layers),
        "compression of other than 1 or 2 tokens per entry": any(layer.m not in (0, 1, 2) for layer in config.layers),
        "index heads whose scale is no power of two": not _is_power_of_4(
            config.index.head_dim * config.index.num_heads
        ),
        "a hidden size that is no multiple of 128": config.hidden_size % 128 != 0,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"a model with {reason} runs on the CPU only; set model.device to cpu", param="model.device"
            )
