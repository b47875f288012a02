# pyright: basic
"""What the running compiler can be told."""

import functools

import torch
from triton import knobs


@functools.cache
def speaks_ptx() -> bool:
    """Return whether kernels may hold PTX: not under AMD's compiler and not in the interpreter; the environment says so."""
    return torch.version.hip is None and not knobs.runtime.interpret


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Return whether products of this device are summed in tensor memory: NVIDIA's chips of major capability 10."""
    return device.type == "cuda" and speaks_ptx() and torch.cuda.get_device_capability(device)[0] == 10
