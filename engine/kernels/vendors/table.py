"""The vendors' kernels that can stand in for ours, a row each, and which of them one engine may use.

A row is used by default only for ops that a record in `benchmarks/results` shows to be faster than ours on equal work;
today that is none. A row that is forced is used for all its ops, or the process does not start. Knows no model.
"""

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from core.errors import ConfigError
from engine.config import KernelsConfig
from engine.kernels.ops import PROVIDERS, Op, Provider, installed

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor(Provider):
    """A package of kernels behind `module`, which adapts it: functions of the names and signatures of ops."""

    ops: frozenset[str]
    wheels: Mapping[str, str]
    """Distributions that have it, each with the first version that the adapter is written for."""
    majors: frozenset[int]
    """Major compute capabilities."""
    invariant: bool
    """A row's bits depend on the row alone, as deterministic engines ask."""
    recorded: Mapping[str, str] = field(default_factory=dict[str, str])
    """Op -> the record that shows it faster."""
    forced: bool = False

    def serves(self, op: str, device: torch.device) -> bool:
        """Return whether it may and can serve an op there."""
        return op in self.ops and (self.forced or op in self.recorded) and self.why_not(device) is None

    def load(self, op: str) -> Op:
        """Return the adapted function, and say so: whoever reads a log must see whose kernel computes."""
        why = "forced by engine.kernels.force" if self.forced else self.recorded[op]
        _LOG.warning("op %s is computed by %s %s (%s)", op, self.name, self.version(), why)
        return getattr(importlib.import_module(self.module), op)

    def version(self) -> str | None:
        """Return the installed version; None: not installed."""
        wheel = self._wheel()
        return None if wheel is None else importlib.metadata.version(wheel)

    def why_not(self, device: torch.device) -> str | None:
        """Return what keeps it from running on a device; None: nothing."""
        wheel = self._wheel()
        if self.needs is None or not installed(self.needs) or wheel is None:
            return f"{' or '.join(self.wheels)} is not installed"
        version, least = importlib.metadata.version(wheel), self.wheels[wheel]
        if _numbers(version) < _numbers(least):
            return f"version {version} is installed, the first that fits is {least}"
        major = capability_of(device)
        if device.type not in self.devices or major not in self.majors:
            return f"{device} has compute capability {major}, it runs on {sorted(self.majors)}"
        return None

    def _wheel(self) -> str | None:
        """Return the first of the distributions that is installed."""
        return next((wheel for wheel in self.wheels if any(importlib.metadata.distributions(name=wheel))), None)


def capability_of(device: torch.device) -> int:
    """Return the major compute capability of a device, 0 if it has none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.cuda.is_available() else 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_GPU = frozenset({"cuda"})
VENDORS = (
    Vendor(
        "deep_gemm", "engine.kernels.vendors.deep_gemm", "deep_gemm", _GPU, ops=frozenset({"plain_linear"}),
        wheels={"sgl-deep-gemm": "0.1.3", "deep-gemm": "2.1.0"}, majors=frozenset({9, 10}), invariant=False,
    ),
    # Its product over bfloat16 keys of 512 values refuses Hopper.
    Vendor(
        "flash_mla", "engine.kernels.vendors.flash_mla", "flash_mla", _GPU, ops=frozenset({"sparse_attention"}),
        wheels={"sgl-flash-mla": "1.0.0", "flash-mla": "1.0.0"}, majors=frozenset({10}), invariant=False,
    ),
    Vendor(
        "deep_select", "engine.kernels.vendors.deep_select", "deep_select", _GPU, ops=frozenset({"select_top"}),
        wheels={"deep-select": "1.0.0"}, majors=frozenset({9, 10}), invariant=True,
    ),
    Vendor(
        "tile_kernels", "engine.kernels.vendors.tile_kernels", "tile_kernels", _GPU, ops=frozenset({"quantize_rows"}),
        wheels={"tile-kernels": "1.0.0"}, majors=frozenset({9, 10}), invariant=True,
    ),
    # Dispatch and combine over several ranks: no op of the table yet.
    Vendor(
        "deep_ep", "engine.kernels.vendors.deep_ep", "deep_ep", _GPU, ops=frozenset(), wheels={"deep-ep": "1.0.0"},
        majors=frozenset({9, 10}), invariant=False,
    ),
)  # fmt: skip


def providers_for(
    config: KernelsConfig, device: torch.device, *, deterministic: bool, vendors: tuple[Vendor, ...] = VENDORS
) -> tuple[Provider, ...]:
    """Return the providers of an engine in order of preference; raises `ConfigError` if what is forced cannot be."""
    known = {vendor.name for vendor in vendors}
    for name in (*config.force, *config.forbid):
        if name not in known:
            raise ConfigError(
                f"engine.kernels names {name!r}; known are {', '.join(sorted(known))}", param="engine.kernels"
            )
    rows: list[Provider] = []
    for vendor in vendors:
        if vendor.name in config.forbid:
            continue
        if vendor.name in config.force:
            invariant = vendor.invariant or not deterministic
            why = (
                vendor.why_not(device) if invariant else "engine.deterministic is on, and its bits depend on the batch"
            )
            why = why or (None if vendor.ops else "it has no op yet")
            if why is not None:
                raise ConfigError(f"engine.kernels.force names {vendor.name}, but {why}", param="engine.kernels.force")
            rows.append(replace(vendor, forced=True))
        elif vendor.recorded and (vendor.invariant or not deterministic):
            rows.append(vendor)
    return (*rows, *PROVIDERS)
