# pyright: basic
"""What the running compiler can be told."""

import torch
from triton import knobs


def speaks_ptx() -> bool:
    """Return whether kernels may hold PTX: not under AMD's compiler and not in the interpreter."""
    return torch.version.hip is None and not knobs.runtime.interpret
