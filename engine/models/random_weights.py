"""Weights that no file holds: drawn on the GPU from a seed and each tensor's name, to measure models of any size.

A model directory asks for them by `tandem_random_weights` in its config.json and has no safetensors. Equal in every
process on devices of one kind.
"""

import zlib
from collections.abc import Sequence

import torch

KEY = "tandem_random_weights"
"""In config.json: the seed."""


class RandomWeights:
    """As `engine.models.loader.Checkpoint`: any tensor that is asked for exists."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor of that name: ones for vectors (norms), else normal with variance 1 / columns."""
        if len(shape) < 2:
            return torch.ones(*shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        tensor = torch.empty(*shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0, shape[-1] ** -0.5, generator=generator)

    def finish(self, ignore: Sequence[str] = ()) -> None:
        """Nothing is left over."""
