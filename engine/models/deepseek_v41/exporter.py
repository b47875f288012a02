"""Writes a complete checkpoint directory of a generated model, in the published formats.

Config, shards with an index that carries checksums, tokenizer and chat configuration, and the compressed vocabulary of
the n-gram tables. The same seed gives the same bytes on every machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from engine.models.deepseek_v41.checkpoint import INDEX, Index, IndexMetadata, crc32_of
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.inventory import TensorSpec, inventory
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.random_weights import random_tensor, random_weights
from engine.models.deepseek_v41.token_map import TOKEN_MAP_FILE, modular_map
from engine.models.deepseek_v41.tokenizer_files import loudness, write_tokenizer
from engine.models.deepseek_v41.weights import Weights

_SHARD_BYTES = 2 << 20
_VISION = ("image_", "aligner.", "vision.")


def export(directory: Path, raw: dict[str, Any], seed: int, *, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the model of a published configuration into an existing directory, in shards of about `shard_bytes`."""
    config = parse_config(raw)
    (directory / "config.json").write_bytes(_json(raw))
    write_tokenizer(directory, config)
    if config.engram is not None:
        token_map = modular_map(config.vocab_size, config.engram.compressed_vocab_size)
        (directory / TOKEN_MAP_FILE).write_bytes(msgspec.json.encode(token_map))
    weights = readable(random_weights(config, seed, torch.float32), config)
    write_shards(directory, chain(published(weights, config), vision_tensors(config, seed)), shard_bytes)


def readable(weights: Weights, config: V41Config) -> Weights:
    """Return the weights with heads that favour letters over rare tokens, so that a random model's text is readable."""
    loud = torch.tensor(loudness(config))[:, None]
    dspark = weights.dspark
    if dspark is not None:
        dspark = replace(dspark, markov_head=dspark.markov_head * loud)
    return replace(weights, head=weights.head * loud, dspark=dspark)


def vision_tensors(config: V41Config, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the image encoder, drawn by name."""
    for spec in inventory(config):
        if spec.name.startswith(_VISION):
            spread, mean = _vision_spread(spec)
            yield spec.name, random_tensor(seed, spec.name, spec.shape, spread, mean).bfloat16()


def _vision_spread(spec: TensorSpec) -> tuple[float, float]:
    if spec.name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
        return 0.1, 1.0
    if spec.name.endswith(".bias"):
        return 0.05, 0.0
    return (1.0 if len(spec.shape) == 1 else spec.shape[-1] ** -0.5), 0.0


def write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write tensors as they come into numbered shards and an index."""
    parts: list[list[str]] = []
    crc32: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(held, directory / _part_name(len(parts)), metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        crc32[name] = crc32_of(held[name])
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= shard_bytes:
            flush()
            size = 0
    if held:
        flush()
    final = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for i, name in enumerate(final):
        (directory / _part_name(i)).chmod(0o644)
        (directory / _part_name(i)).rename(directory / name)
    where = {name: final[i] for i, names in enumerate(parts) for name in names}
    index = Index(metadata=IndexMetadata(total_size=total, crc32=crc32), weight_map=where)
    (directory / INDEX).write_bytes(_json(index))


def _part_name(i: int) -> str:
    return f"part-{i:05d}.safetensors"


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
