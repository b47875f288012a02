import pytest
import torch

from core.errors import CheckpointError, ConfigError
from engine.device import CPU, resolve_device
from engine.models.builtin import prepare_builtin
from engine.models.registry import load_model


@pytest.fixture
def gpus(monkeypatch):
    def there_are(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there_are


def test_names_of_devices(gpus):
    gpus(2)
    assert [str(resolve_device(text)) for text in ("cpu", "cuda", "cuda:1", "auto")] == [
        "cpu",
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(gpus):
    gpus(0)
    assert resolve_device("auto") == CPU
    for text in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="sees no GPU"):
            resolve_device(text)


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(gpus):
    gpus(2)
    with pytest.raises(ConfigError, match=r"sees 2 GPUs: cuda:0 to cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", "cuda:-1"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="is none of cpu, cuda"):
        resolve_device(text)


def test_a_family_without_device_code_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="runs on the CPU only"):
        load_model(prepare_builtin("scripted", tmp_path), device=torch.device("cuda", 0))
    assert load_model(prepare_builtin("scripted", tmp_path)).device == CPU
