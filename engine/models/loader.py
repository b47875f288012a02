"""Weights of a checkpoint directory: one safetensors file or an index with shards, memory-mapped, taken by name.

A tensor whose dtype is the wanted one is a view of the file's mapping, so several workers of a machine share one copy
of the weights through the page cache; others are converted one by one. Knows no architecture: the caller names what it
wants, and `finish` finds what nobody wanted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from core.errors import CheckpointError
from engine.models.random_weights import KEY, RandomWeights

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
"""Names of the element types that models compute in."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class WeightSource(Protocol):
    """Where a family takes its weights from."""

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of exactly this shape in the model's dtype; raises `CheckpointError` naming it."""
        ...

    def finish(self, ignore: Sequence[str] = ()) -> None:
        """Raise `CheckpointError` if there are tensors nobody took, except names that end with one of `ignore`."""
        ...


def open_weights(directory: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> WeightSource:
    """Return the weights of a directory with this config.json: its files', or random ones where it asks for them."""
    seed = config.get(KEY)
    if seed is None:
        return Checkpoint(directory, dtype)
    if device.type == "cpu":
        # Billions of numbers take minutes there, and workers on both would have different ones.
        raise CheckpointError(f"{directory} has random weights ({KEY}), drawn on a GPU only; set model.device to cuda")
    return RandomWeights(int(seed), dtype, device)


class Checkpoint:
    """Open files of one checkpoint. Tensors stay valid as long as anybody holds them."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory = directory
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        self._where = self._locate()
        self._taken: set[str] = set()

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of exactly this shape in the model's dtype; raises `CheckpointError` naming it."""
        file = self._where.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing from {self._directory}")
        self._taken.add(name)
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"tensor {name} in {self._directory / file} cannot be read: {error}") from error
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {name} in {self._directory / file} has type {tensor.dtype}, not a float type"
            )
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"tensor {name} in {self._directory / file} has shape {list(tensor.shape)}, "
                f"the configuration asks for {list(shape)}"
            )
        return tensor.to(self._dtype)

    def finish(self, ignore: Sequence[str] = ()) -> None:
        """Raise `CheckpointError` if there are tensors nobody took, except names that end with one of `ignore`."""
        extra = sorted(n for n in self._where.keys() - self._taken if not n.endswith(tuple(ignore)))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(
                f"{self._directory} has tensor {extra[0]}{more}, which this architecture does not use"
            )

    def _locate(self) -> dict[str, str]:
        index = self._directory / _INDEX
        if not index.exists():
            return dict.fromkeys(self._open(_SINGLE), _SINGLE)
        try:
            listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from error
        held = {file: set(self._open(file)) for file in sorted(set(listed.values()))}
        for name, file in listed.items():
            if name not in held[file]:
                raise CheckpointError(f"tensor {name} is missing from {self._directory / file}, where the index has it")
        return listed

    def _open(self, file: str) -> list[str]:
        path = self._directory / file
        try:
            self._files[file] = safe_open(str(path), framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(f"model file {path} does not exist") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"model file {path} is truncated or corrupted: {error}") from error
        return list(self._files[file].keys())
