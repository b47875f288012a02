"""The table of ops: which provider serves each, by device and by what is installed.

Every op has a reference in torch, which is its specification. A provider's function has the same signature. Modules are
loaded when an op is first asked for: a machine without Triton never imports it.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Provider:
    """Where ops come from."""

    name: str
    module: str
    """Python module whose submodules are ops, one each, with a function of the same name."""
    needs: str | None
    """Distribution that must be importable."""
    devices: frozenset[str]
    """Kinds of torch device."""

    def serves(self, op: str, device: torch.device) -> bool:
        """Return whether it is installed and has the op for this device."""
        if device.type not in self.devices or (self.needs is not None and not installed(self.needs)):
            return False
        return importlib.util.find_spec(f"{self.module}.{op}") is not None

    def load(self, op: str) -> Op:
        """Return the function."""
        return getattr(importlib.import_module(f"{self.module}.{op}"), op)


REFERENCE = Provider("reference", "engine.kernels.reference", None, frozenset({"cpu", "cuda"}))
TRITON = Provider("triton", "engine.kernels", "triton", frozenset({"cuda"}))
PROVIDERS = (TRITON, REFERENCE)
"""In order of preference."""


@functools.cache
def installed(distribution: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(distribution) is not None


def provider_of(op: str, device: torch.device, providers: tuple[Provider, ...] = PROVIDERS) -> Provider:
    """Return the first provider that serves an op on a device; the last one must."""
    return next(provider for provider in providers if provider.serves(op, device))


def pick(op: str, device: torch.device, providers: tuple[Provider, ...] = PROVIDERS) -> Op:
    """Return the function that serves an op on a device."""
    return provider_of(op, device, providers).load(op)
