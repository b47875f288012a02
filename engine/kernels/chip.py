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
def sums_alike() -> bool:
    """Return whether a sum of products has the same bits in tiles of any size: so on Hopper, where batches of all sizes were
    compared with one row; other chips were not.
    """
    return torch.cuda.is_available() and speaks_ptx() and torch.cuda.get_device_capability()[0] == 9


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Return whether products of this device are summed in tensor memory: NVIDIA's chips of major capability 10."""
    return device.type == "cuda" and speaks_ptx() and torch.cuda.get_device_capability(device)[0] == 10
