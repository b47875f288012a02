"""Weights of the image encoder: plain tensors in the compute dtype, and how they are taken from a checkpoint by name.

Shape legend: w width of the encoder, d hidden of the text model, p pixels per side of a patch, r patches per side of a
cell, I inner width. Every linear is [out, in] with a bias unless it is said that it has none.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.config import VisionConfig
from engine.models.deepseek_v41.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Linear:
    """An affine map."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor  # [out]


@dataclass(frozen=True, slots=True)
class VitBlockWeights:
    """One layer over patches."""

    norm1: torch.Tensor  # [w]
    norm2: torch.Tensor  # [w]
    wqkv: Linear  # [3 w, w]: queries, keys, values
    wo: Linear  # [w, w]
    w1: torch.Tensor  # [2 I, w] gate, then up; no bias
    w2: torch.Tensor  # [w, I]; no bias


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The whole encoder, and the learned rows around what it gives."""

    patch: Linear  # [w, 3 p p]: channel, row, column of a patch's pixels
    blocks: tuple[VitBlockWeights, ...]
    norm: torch.Tensor  # [w]
    aligner1: Linear  # [d, w r r]: channel, row, column of a cell's patches
    aligner2: Linear  # [d, d]
    start: torch.Tensor  # [d]
    new_line: torch.Tensor  # [d]
    end: torch.Tensor  # [d]


def read_vision(tensors: Tensors, config: VisionConfig) -> VisionWeights:
    """Return the encoder of a checkpoint; raises `CheckpointError` naming the tensor that is wrong."""

    def linear(name: str) -> Linear:
        return Linear(tensors.plain(f"{name}.weight"), tensors.plain(f"{name}.bias"))

    def block(at: str) -> VitBlockWeights:
        return VitBlockWeights(
            norm1=tensors.plain(f"{at}.norm1.weight"),
            norm2=tensors.plain(f"{at}.norm2.weight"),
            wqkv=linear(f"{at}.attn.wqkv"),
            wo=linear(f"{at}.attn.wo"),
            w1=tensors.plain(f"{at}.mlp.w1.weight"),
            w2=tensors.plain(f"{at}.mlp.w2.weight"),
        )

    return VisionWeights(
        patch=linear("vision.patch_embed.proj"),
        blocks=tuple(block(f"vision.blocks.{i}") for i in range(config.num_layers)),
        norm=tensors.plain("vision.norm.weight"),
        aligner1=linear("aligner.w1"),
        aligner2=linear("aligner.w2"),
        start=tensors.plain("image_start"),
        new_line=tensors.plain("image_newline"),
        end=tensors.plain("image_end"),
    )
