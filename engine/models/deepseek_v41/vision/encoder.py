"""One image in, the rows that stand for it in the text model out.

Every image is encoded alone, so what an image gives depends on its pixels only. Knows no prompt and no cache.

Shape legend: h, w pixels, p pixels per side of a patch, d hidden of the text model, t positions of the image's span.
"""

import torch

from core.image_plan import ImageRules, Spot, plan_size
from engine.models.deepseek_v41.config import VisionConfig
from engine.models.deepseek_v41.tensors import Tensors
from engine.models.deepseek_v41.vision.aligner import Aligner
from engine.models.deepseek_v41.vision.vit import Vit
from engine.models.deepseek_v41.vision.weights import VisionWeights, read_vision


def image_rules(config: VisionConfig) -> ImageRules:
    """Return the image budget of a model."""
    return ImageRules(
        patch=config.patch_size,
        downsample=config.downsample_ratio,
        max_tokens=config.max_image_tokens,
        min_pixels=config.min_pixels,
        max_ratio=config.max_wh_ratio,
    )


def patches_of(pixels: torch.Tensor, patch: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [patches, 3 p p] in [-1, 1], patches in reading order, of uint8 RGB [h, w, 3] with whole patches."""
    height, width, _ = pixels.shape
    values = pixels.to(dtype) / 255
    grid = ((values - 0.5) / 0.5).reshape(height // patch, patch, width // patch, patch, 3)
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3 * patch * patch)


class VisionEncoder:
    """Implements `engine.models.model.ImageEncoder`."""

    def __init__(self, weights: VisionWeights, config: VisionConfig) -> None:
        self._weights = weights
        self._config = config
        self._rules = image_rules(config)
        self._vit = Vit(weights, config)
        self._aligner = Aligner(weights, config.downsample_ratio)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the rows [t, d] of every position of the span, learned ones included; `pixels` uint8 [h, w, 3]."""
        height, width, _ = pixels.shape
        plan = plan_size(width, height, self._rules)
        weights, patch = self._weights, self._config.patch_size
        rows, columns = height // patch, width // patch
        patches = patches_of(pixels, patch, weights.start.dtype)
        cells = self._aligner.forward(self._vit.forward(patches, rows, columns), rows, columns)
        spots = torch.tensor(plan.spots())
        span = torch.empty(len(spots), cells.shape[1], dtype=cells.dtype)
        for spot, learned in ((Spot.START, weights.start), (Spot.NEW_LINE, weights.new_line), (Spot.END, weights.end)):
            span[spots == spot] = learned
        span[spots == Spot.IMAGE] = cells
        return span


def read_encoder(tensors: Tensors, config: VisionConfig) -> VisionEncoder:
    """Return the encoder of a checkpoint; raises `CheckpointError` naming the tensor that is wrong."""
    return VisionEncoder(read_vision(tensors, config), config)
