"""Images of random pixels, their places in prompts, and the image encoder of the generated DeepSeek model."""

import functools

import msgspec
import numpy as np
import torch

from core.hashing import image_digest
from core.image_plan import plan_size
from core.request import MmItem
from engine.models.deepseek_v41.exporter import vision_tensors
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.tensors import Tensors
from engine.models.deepseek_v41.vision.encoder import VisionEncoder, image_rules
from engine.models.deepseek_v41.vision.weights import read_vision


class TensorTable:
    """A `TensorSource` over a dict."""

    def __init__(self, tensors):
        self._tensors = tensors

    def get(self, name):
        return self._tensors[name]


@functools.cache
def tiny_vision(dtype=torch.float64, seed=41):
    """(config, weights) of the encoder of `v41-tiny`."""
    config = parse_config(tiny_config())
    source = TensorTable(dict(vision_tensors(config, seed)))
    return config.vision, read_vision(Tensors(source, dtype, config.quant.block), config.vision)


@functools.cache
def tiny_encoder(dtype=torch.float64):
    config, weights = tiny_vision(dtype)
    return VisionEncoder(weights, config)


@functools.cache
def tiny_rules():
    return image_rules(tiny_vision()[0])


def random_pixels(seed, height, width):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def image(seed, height, width, start=0, rules=None):
    """An image whose place in the prompt begins at `start`."""
    pixels = random_pixels(seed, height, width).tobytes()
    plan = plan_size(width, height, rules or tiny_rules())
    return MmItem(
        digest=image_digest(height, width, pixels),
        start=start,
        end=start + plan.num_tokens,
        height=height,
        width=width,
        pixels=pixels,
    )


def prompt_with(parts, image_token=510):
    """(token ids, items) of a prompt of lists of ids and images, in this order; images are moved to their places."""
    ids, items = [], []
    for part in parts:
        if isinstance(part, MmItem):
            count = part.end - part.start
            items.append(msgspec.structs.replace(part, start=len(ids), end=len(ids) + count))
            ids += [image_token] * count
        else:
            ids += part
    return tuple(ids), tuple(items)
