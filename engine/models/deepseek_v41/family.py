"""DeepSeek-V4 and V4.1 from a checkpoint directory: what the registry calls.

Modes decide what windows behind a prefix hit and early in a prompt are worth (A10): `replay` recomputes the last window
after a hit and runs only the end of a prompt through the decoder; `mask` means the same but runs all rows (the oracle of
`replay`); `exact` computes every row whole and reuses no pages, which hold no windows.
"""

import logging
import math
from pathlib import Path
from typing import Any

import torch

from core.errors import CheckpointError, ConfigError
from engine.cache.hit import ReuseKind, ReuseRule
from engine.device import CPU
from engine.images import ImageFacts
from engine.kernels.ops import PROVIDERS, Provider
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.checkpoint import PublishedCheckpoint
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.drafting import DraftingDeviceModel
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.ops import check_supported
from engine.models.deepseek_v41.device.parts import memory_bytes
from engine.models.deepseek_v41.device.reading import read_parts
from engine.models.deepseek_v41.loader import open_checkpoint, read_weights
from engine.models.deepseek_v41.model import DeepseekModel, DraftingDeepseekModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.replay import COMPACT, MASK, OFF
from engine.models.deepseek_v41.step import DecoderReplay
from engine.models.deepseek_v41.tensors import Tensors
from engine.models.deepseek_v41.token_map import read_token_map
from engine.models.deepseek_v41.vision.encoder import VisionEncoder, image_rules, read_encoder
from engine.models.manifest import Manifest
from engine.models.model import Model, ModelFacts

_LOG = logging.getLogger(__name__)
EXACT, REPLAY, ORACLE = "exact", "replay", "mask"
_SLACK_TOKENS = 12
"""What the vendor keeps for the decoder beyond one window."""
_DTYPES = {"f32": torch.float32, "f64": torch.float64}


def load(
    directory: Path,
    config: dict[str, Any],
    manifest: Manifest,
    name: str,
    dtype: str | None,
    *,
    mode: str | None,
    device: torch.device = CPU,
    providers: tuple[Provider, ...] = PROVIDERS,
) -> Model:
    """Build the model of a checkpoint directory. `dtype` None: float32, whatever packed forms the checkpoint has.

    On another device than the CPU weights stay packed and values are bfloat16: `dtype` None or bf16. `mode` None:
    `replay` if the model has a decoder, else `exact`. Raises `CheckpointError` and `ConfigError`.
    """
    parsed = parse_config(config)
    elem = _elem_of(dtype, device)
    has_decoder = parsed.decoder_start < parsed.num_layers
    mode = mode or (REPLAY if has_decoder else EXACT)
    if mode not in (EXACT, REPLAY, ORACLE):
        raise ConfigError(f"model.mode = {mode!r} is none of {EXACT}, {REPLAY}, {ORACLE}")
    rule, decoder = rules_of(parsed, mode)
    facts = ModelFacts(
        name=name,
        revision=manifest.revision,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=parsed.vocab_size,
        max_positions=parsed.max_positions,
        eos_token_ids=parsed.eos_token_ids,
        kv_dtype=f"packed-{elem}",
        mode=EXACT if mode == EXACT else f"replay-{rule.replay_tokens}-{rule.keep_tokens}",
        history_tokens=parsed.engram.max_ngram - 1 if parsed.engram else 0,
        reuse=rule,
        images=image_facts_of(parsed),
    )
    token_map = None
    if parsed.engram is not None:
        token_map = torch.tensor(read_token_map(directory, parsed.engram, parsed.vocab_size))
    checkpoint = open_checkpoint(directory, parsed)
    if device.type != "cpu":
        return _on_device(checkpoint, parsed, facts, decoder, token_map=token_map, device=device, providers=providers)
    weights = read_weights(checkpoint, parsed, _DTYPES[elem])
    encoder: VisionEncoder | None = None
    if facts.images is not None and parsed.vision is not None:
        encoder = read_encoder(Tensors(checkpoint, _DTYPES[elem], parsed.quant.block), parsed.vision)
    kind = DeepseekModel if weights.dspark is None else DraftingDeepseekModel
    return kind(
        parsed,
        weights,
        facts,
        arithmetic_of(parsed),
        token_map=token_map,
        replay=decoder,
        image_encoder=encoder,
    )


def _elem_of(dtype: str | None, device: torch.device) -> str:
    """Return the element type of pending rows; raises `CheckpointError` if the device does not compute in `dtype`."""
    known = _DTYPES if device.type == "cpu" else ("bf16",)
    if dtype is not None and dtype not in known:
        raise CheckpointError(f"dtype {dtype!r} is not supported on {device.type}; known are {', '.join(known)}")
    return dtype if dtype in _DTYPES else "f32"


def _on_device(
    checkpoint: PublishedCheckpoint,
    config: V41Config,
    facts: ModelFacts,
    decoder: DecoderReplay,
    *,
    token_map: torch.Tensor | None,
    device: torch.device,
    providers: tuple[Provider, ...],
) -> DeviceDeepseekModel:
    check_supported(config)
    encoder: VisionEncoder | None = None
    if facts.images is not None and config.vision is not None:
        encoder = read_encoder(Tensors(checkpoint, torch.float32, config.quant.block), config.vision)
    parts = read_parts(checkpoint, config, device, token_map)
    held = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory_bytes(parts).items())
    _LOG.info("weights on %s: %s", device, held)
    kind = DeviceDeepseekModel if parts.draft is None else DraftingDeviceModel
    return kind(config, parts, facts, replay=decoder, image_encoder=encoder, providers=providers)


def image_facts_of(config: V41Config) -> ImageFacts | None:
    """Return what images a checkpoint's model takes; None: it has no encoder."""
    if config.vision is None or config.image_token_id is None:
        return None
    return ImageFacts(token_id=config.image_token_id, rules=image_rules(config.vision))


def rules_of(config: V41Config, mode: str) -> tuple[ReuseRule, DecoderReplay]:
    """Return how prefixes are reused in a mode, and which rows run through the decoder."""
    if mode == EXACT:
        return ReuseRule(kind=ReuseKind.NONE), DecoderReplay(mode=OFF)
    keep = config.window + _SLACK_TOKENS
    align = math.lcm(*(layer.m for layer in config.kv_owners))
    rule = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=config.window, align_tokens=align, keep_tokens=keep)
    return rule, DecoderReplay(mode=COMPACT if mode == REPLAY else MASK, keep=keep)
