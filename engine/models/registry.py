"""Which module loads which architecture, imported only when asked for; the one way to load a model from a directory."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from core.errors import CheckpointError
from engine.device import CPU
from engine.kernels.ops import PROVIDERS, Provider
from engine.models.manifest import MANIFEST, read_manifest
from engine.models.model import Model

_LOADERS = {
    "ScriptedForTandem": "engine.models.scripted",
    "LlamaForCausalLM": "engine.models.llama",
    "MistralForCausalLM": "engine.models.llama",
    "Qwen2ForCausalLM": "engine.models.llama",
    "DeepseekV41ForCausalLM": "engine.models.deepseek_v41.family",
    "DeepseekV4ForCausalLM": "engine.models.deepseek_v41.family",
}
"""Architecture name of config.json -> module with `load(directory, config, manifest, name, dtype) -> Model`."""
_WITH_MODES = ("engine.models.deepseek_v41.family",)
"""Modules whose `load` also takes `mode`."""
_WITH_DEVICE: tuple[str, ...] = ("engine.models.deepseek_v41.family", "engine.models.llama")
"""Modules whose `load` also takes `device` and `providers`; models of all others run on the CPU only."""


def load_model(
    directory: Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    mode: str | None = None,
    device: torch.device = CPU,
    providers: tuple[Provider, ...] = PROVIDERS,
    verify: bool = True,
) -> Model:
    """Load the model of a directory.

    `name` is what clients call it (default: the manifest's, else the directory's); `dtype` one of f32, f64, bf16
    (default: the checkpoint's); `mode` how a model that can replay deals with windows (default: the model's own);
    `device` where its weights lie, `providers` whose kernels it uses there. With `verify`, file checksums are compared too. Raises `CheckpointError`.
    """
    model = _load(directory, name, dtype, mode, device=device, providers=providers)
    if verify and (directory / MANIFEST).exists():
        # After loading, whose errors name the tensor that is wrong and not only its file.
        read_manifest(directory, verify=True)
    return model


def _load(
    directory: Path,
    name: str | None,
    dtype: str | None,
    mode: str | None,
    *,
    device: torch.device,
    providers: tuple[Provider, ...],
) -> Model:
    manifest = read_manifest(directory, verify=False)
    path = directory / "config.json"
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"model directory {directory} has no readable config.json") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    architectures = config.get("architectures") or ["(none)"]
    module = _LOADERS.get(str(architectures[0]))
    if module is None:
        known = ", ".join(sorted(_LOADERS))
        raise CheckpointError(f"{path} names architecture {architectures[0]}; supported are {known}")
    load: Callable[..., Model] = importlib.import_module(module).load
    options: dict[str, Any] = {}
    if module in _WITH_MODES:
        options["mode"] = mode
    elif mode not in (None, "exact"):
        raise CheckpointError(f"{path} is a model that is always exact; mode {mode!r} is not for it")
    if module in _WITH_DEVICE:
        options |= {"device": device, "providers": providers}
    elif device.type != "cpu":
        raise CheckpointError(f"{path} is a model that runs on the CPU only; set model.device to cpu, not {device}")
    return load(directory, config, manifest, name or manifest.name, dtype, **options)
