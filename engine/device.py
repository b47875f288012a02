"""Where a model's weights and KV lie: from the text of `model.device` to a torch device that this machine has."""

import torch

from core.errors import ConfigError

CPU = torch.device("cpu")


def resolve_device(text: str) -> torch.device:
    """Return the device of ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (the first GPU if there is one, else the CPU).

    A GPU always comes with its index. Raises `ConfigError` for another text, or if this process sees no such GPU.
    """
    kind, colon, number = text.partition(":")
    if kind not in ("cpu", "cuda", "auto") or (colon and (kind != "cuda" or not number.isdecimal())):
        raise ConfigError(f"model.device = {text!r} is none of cpu, cuda, cuda:N, auto", param="model.device")
    count = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return CPU
    if not count:
        raise ConfigError(
            f"model.device = {text}, but this process sees no GPU (no driver, or a torch build without CUDA); "
            "set it to cpu, or to auto to take what there is",
            param="model.device",
        )
    index = int(number or 0)
    if index >= count:
        raise ConfigError(
            f"model.device = {text}, but this process sees {count} GPU{'s' if count > 1 else ''}: "
            f"cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}",
            param="model.device",
        )
    return torch.device("cuda", index)
