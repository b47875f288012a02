"""The Llama of a GPU does the arithmetic of the one of host memory; here on host memory, with the reference ops."""

import numpy as np
import pytest
import torch

from benchmarks.model_driver import ModelDriver
from engine.batch import ForwardBatch
from tests.fakes.model_rig import device_model_of, model_of

torch.set_num_threads(1)


class DeviceDriver(ModelDriver):
    """Batches whose rows are on the device."""

    def batch(self, chunks):
        return super().batch(chunks).on(torch.device("cpu"))


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def steps(run):
    yield run.step({0: prompt(1, 40), 2: prompt(2, 7)})
    yield run.step({0: prompt(3, 1), 1: prompt(4, 33), 2: prompt(5, 1)})
    yield run.step({2: prompt(6, 21), 1: prompt(7, 1), 0: prompt(8, 1)})


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-window"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_are_those_of_the_model_on_host_memory(name, deterministic):
    theirs = steps(ModelDriver(model_of(f"{name}-f64"), deterministic=deterministic))
    for got, want in zip(
        steps(DeviceDriver(device_model_of(f"{name}-f64"), deterministic=deterministic)), theirs, strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        assert want.std() > 0.1


def test_deterministic_logits_are_equal_to_the_bit_over_batches_and_chunkings():
    model, tokens = device_model_of("tiny-llama"), prompt(7, 37)
    truth = DeviceDriver(model, deterministic=True).step({0: tokens})[0]
    chunked = DeviceDriver(model, deterministic=True)
    for part in (tokens[:5], tokens[5:36], tokens[36:]):
        logits = chunked.step({1: part, 3: prompt(len(part), 3)})
    assert torch.equal(logits[0], truth)


def test_only_decode_steps_of_models_without_windows_can_be_recorded():
    driver = DeviceDriver(device_model_of("tiny-llama"))
    decode, chunk = driver.batch({0: [1], 1: [2]}), driver.batch({0: [1], 1: [2, 3]})
    assert isinstance(decode, ForwardBatch)
    assert device_model_of("tiny-llama").graph_ready(decode)
    assert not device_model_of("tiny-llama").graph_ready(chunk)
    assert not device_model_of("tiny-window").graph_ready(decode)
    assert not device_model_of("tiny-llama-f64").graph_ready(decode)
