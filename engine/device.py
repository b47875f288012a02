"""Where a model's weights and KV lie: from the text of `model.device` to a torch device that this machine has."""

from collections.abc import Sequence

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


def make_current(device: torch.device) -> None:
    """Make a GPU the calling thread's: kernels are launched there, whatever memory their arguments are in."""
    if device.type != "cpu":
        torch.cuda.set_device(device)


class _Span:
    """Device memory as frameworks exchange it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensors_over(spans: Sequence[tuple[int, int]], device: torch.device) -> list[torch.Tensor]:
    """Return uint8 [n] over each (address, n bytes) of a GPU's memory, without a copy; its owner must outlive them."""
    return [torch.as_tensor(_Span(address, nbytes), device=device) for address, nbytes in spans]


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Return a GPU's free and total bytes; what torch holds unused counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total


def memory_report(device: torch.device, kv_bytes: int) -> list[str]:
    """Return what a GPU's memory is used for once model and KV pool are there; for people, one fact a line."""
    free, total = free_bytes(device)
    ours = torch.cuda.memory_allocated(device)
    gib = 1 << 30
    return [
        f"{device}: {torch.cuda.get_device_name(device)}, {total / gib:.1f} GiB",
        f"  weights and tables: {ours / gib:.2f} GiB",
        f"  KV pool: {kv_bytes / gib:.2f} GiB",
        f"  other processes, contexts: {max(0, total - free - ours - kv_bytes) / gib:.2f} GiB",
        f"  left for steps: {free / gib:.2f} GiB",
    ]
