import pytest
import torch

from core.errors import CheckpointError
from engine.models.deepseek_v41.exporter import vision_tensors
from engine.models.deepseek_v41.inventory import inventory
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.tensors import Tensors
from engine.models.deepseek_v41.vision.weights import read_vision
from tests.fakes.vision import TensorTable

torch.set_num_threads(1)
CONFIG = parse_config(tiny_config())
VISION = ("image_", "aligner.", "vision.")


class Recording(TensorTable):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.taken = []

    def get(self, name):
        self.taken.append(name)
        return super().get(name)


def test_every_image_tensor_of_the_inventory_is_taken_once():
    source = Recording(dict(vision_tensors(CONFIG, 1)))
    read_vision(Tensors(source, torch.float32, CONFIG.quant.block), CONFIG.vision)
    assert sorted(source.taken) == sorted(s.name for s in inventory(CONFIG) if s.name.startswith(VISION))


def test_a_tensor_that_is_not_finite_is_named():
    tensors = dict(vision_tensors(CONFIG, 1))
    tensors["aligner.w1.bias"] = torch.full_like(tensors["aligner.w1.bias"], torch.nan)
    with pytest.raises(CheckpointError, match=r"aligner\.w1\.bias"):
        read_vision(Tensors(TensorTable(tensors), torch.float32, CONFIG.quant.block), CONFIG.vision)


def test_weights_are_in_the_type_asked_for():
    source = TensorTable(dict(vision_tensors(CONFIG, 1)))
    weights = read_vision(Tensors(source, torch.float64, CONFIG.quant.block), CONFIG.vision)
    assert {weights.start.dtype, weights.patch.weight.dtype, weights.blocks[1].w2.dtype} == {torch.float64}
