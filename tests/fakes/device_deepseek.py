"""The tiny DeepSeek as the device runs it, of the very weights of `deepseek_driver`, with references for kernels.

`wide` lets references compute in float64 without rounding to bfloat16: what is left is the model's own arithmetic.
"""

import contextlib
import functools

import torch

from engine.models.deepseek_v41.caches import CacheMap
from engine.models.deepseek_v41.device.drafting import DraftingDeviceModel
from engine.models.deepseek_v41.device.reading import read_parts
from engine.models.deepseek_v41.device.turns import Turns
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.step import DecoderReplay
from tests.fakes.deepseek_driver import FACTS, PAGE, Driver, tiny_weights, token_map


class Published(dict):
    """Tensors of a checkpoint that lie in memory."""

    def get(self, name):
        return self[name]


@functools.cache
def tiny_parts():
    config, weights = tiny_weights(torch.float32)
    return read_parts(Published(published(weights, config)), config, torch.device("cpu"), token_map(config))


def device_model(mode="off", keep=20, **options):
    config, _ = tiny_weights(torch.float32)
    return DraftingDeviceModel(config, tiny_parts(), FACTS, replay=DecoderReplay(mode=mode, keep=keep), **options)


@contextlib.contextmanager
def wide():
    """Make every step to float32 or bfloat16 one to float64."""
    kept = torch.Tensor.float, torch.Tensor.bfloat16
    torch.Tensor.float = torch.Tensor.bfloat16 = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.bfloat16 = kept


class WideDriver(Driver):
    """Feeds chunks to a device model that computes in float64 and keeps pending rows so."""

    def __init__(self, mode="off", **options):
        model = device_model(mode)
        model._maps[PAGE] = CacheMap(model.config, PAGE, "f64")
        model._turns = Turns(model.config, model.device, torch.float64)
        super().__init__(model, **options)

    def step(self, chunks, wanted=None):
        with wide():
            return super().step(chunks, wanted)
