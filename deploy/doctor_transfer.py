"""What this machine offers KV transfer: one plain sentence per fact, and what to do about it. `tandem doctor --transfer`.

`look` gathers the facts, `judge` is pure.
"""

import ctypes
import importlib
import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from core.errors import ConfigError
from deploy.doctor import NIXL, Finding, check_shared_memory
from kv_transfer.backends.cma import denied
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.backends.mooncake_engine import DISTRIBUTIONS

MIN_MEMLOCK_BYTES = 1 << 30
LIBRARIES: Mapping[str, str] = {"mooncake": "mooncake.engine", "amd-mori": "mori.io"}
WHEELS = (*DISTRIBUTIONS, *NIXL, "amd-mori")
_INFINIBAND = Path("/sys/class/infiniband")
_PEERMEM = Path("/sys/module/nvidia_peermem")
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found."""

    interfaces: Mapping[str, tuple[str, int]]
    """Name -> (address, Mbit/s or 0 if unknown) of interfaces that are up, without loopback."""
    memlock_bytes: int
    """-1: unlimited."""
    cma_denied: str
    ptrace_scope: str
    shm_free_bytes: int
    adapters: Mapping[str, str]
    """RDMA adapter -> state of its first port, e.g. ``4: ACTIVE``."""
    peer_memory: bool
    gpus: int
    wheels: Mapping[str, str]
    broken: Mapping[str, str]
    """Library -> why it cannot be loaded, for those that are installed."""


def judge(facts: Facts) -> list[Finding]:
    """Return the findings in a fixed order."""
    return [
        *_network(facts),
        check_shared_memory(facts.shm_free_bytes),
        _direct_access(facts),
        *_rdma(facts),
        *_gpu(facts),
        *_libraries(facts),
    ]


def look() -> Facts:
    """Gather the facts of this machine; changes nothing."""
    wheels = {name: version for name in WHEELS if (version := _version(name))}
    byte = ctypes.create_string_buffer(1)
    return Facts(
        interfaces=_interfaces(),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cma_denied=denied(os.getpid(), ctypes.addressof(byte)),
        ptrace_scope=_PTRACE.read_text().strip() if _PTRACE.exists() else "",
        shm_free_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,
        adapters={path.name: _port_state(path) for path in sorted(_INFINIBAND.glob("*"))},
        peer_memory=_PEERMEM.exists(),
        gpus=_gpus(),
        wheels=wheels,
        broken=_broken(wheels),
    )


def _network(facts: Facts) -> list[Finding]:
    if not facts.interfaces:
        return [
            Finding("note", "only the loopback interface is up: KV can move within this host and not between hosts")
        ]
    return [
        Finding("ok", f"{name} has {address}" + (f" at {speed} Mbit/s" if speed else ""))
        for name, (address, speed) in facts.interfaces.items()
    ]


def _direct_access(facts: Facts) -> Finding:
    if facts.cma_denied:
        return Finding(
            "note",
            f"processes may not read each other's memory ({facts.cma_denied}): NIXL on one host falls back to sockets, "
            "5 to 10 times slower; allow process_vm_readv in the seccomp profile (containers: --cap-add SYS_PTRACE)",
        )
    if facts.ptrace_scope not in ("", "0"):
        return Finding(
            "note",
            f"yama ptrace_scope is {facts.ptrace_scope}: NIXL on one host falls back to sockets unless the workers "
            "run as root; set it to 0 (sysctl kernel.yama.ptrace_scope=0)",
        )
    return Finding("ok", "processes may read each other's memory, which NIXL uses on one host")


def _rdma(facts: Facts) -> list[Finding]:
    if not facts.adapters:
        return [Finding("ok", "no RDMA adapter: between hosts KV goes over TCP")]
    found: list[Finding] = []
    for name, state in facts.adapters.items():
        if "ACTIVE" in state:
            found.append(Finding("ok", f"RDMA adapter {name} is active"))
        else:
            found.append(Finding("note", f"RDMA adapter {name} is {state or 'in an unknown state'}; bring its link up"))
    if 0 <= facts.memlock_bytes < MIN_MEMLOCK_BYTES:
        found.append(
            Finding(
                "problem",
                f"only {facts.memlock_bytes >> 10} KiB of memory may be locked, too little to register a KV pool with "
                "an RDMA adapter; use ulimit -l unlimited (containers: --ulimit memlock=-1)",
            )
        )
    return found


def _gpu(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return [Finding("ok", "no NVIDIA GPU with a working driver: KV lies in host memory")]
    found = [Finding("ok", f"{facts.gpus} NVIDIA GPUs: cuda-ipc moves KV between processes of this host")]
    if facts.adapters and not facts.peer_memory:
        found.append(
            Finding(
                "note",
                "the module nvidia_peermem is not loaded: unless kernel and driver share memory by dma-buf, RDMA to the "
                "GPU fails; try modprobe nvidia_peermem",
            )
        )
    return found


def _libraries(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    mooncakes = [name for name in DISTRIBUTIONS if name in facts.wheels]
    if len(mooncakes) > 1:
        found.append(Finding("problem", f"{' and '.join(mooncakes)} overwrite each other's files; uninstall one"))
    for name, reason in facts.broken.items():
        cure = "apt-get install libibverbs1" if "libibverbs" in reason else "install what it names"
        found.append(Finding("problem", f"{name} is installed and cannot be loaded ({reason}); {cure}"))
    if facts.gpus and mooncakes == ["mooncake-transfer-engine-non-cuda"]:
        found.append(
            Finding("note", "this Mooncake knows no GPU memory; on GPU hosts install mooncake-transfer-engine instead")
        )
    if not mooncakes:
        wheel = "mooncake-transfer-engine" if facts.gpus else "mooncake-transfer-engine-non-cuda"
        found.append(
            Finding(
                "note", f"Mooncake is not installed; add it with: pip install {wheel} && apt-get install libibverbs1"
            )
        )
    if not any(name.startswith("nixl") for name in facts.wheels):
        found.append(Finding("note", "NIXL is not installed; add it with: pip install '.[nixl]'"))
    found += [Finding("ok", f"{name} {version}") for name, version in facts.wheels.items()]
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _interfaces() -> dict[str, tuple[str, int]]:
    states = psutil.net_if_stats()
    return {
        name: (address.address, states[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses[:1]
        if name in states and states[name].isup and not address.address.startswith("127.")
    }


def _port_state(adapter: Path) -> str:
    return next((path.read_text().strip() for path in sorted(adapter.glob("ports/*/state"))), "")


def _gpus() -> int:
    try:
        return CudaDriver().num_devices
    except ConfigError:
        return 0


def _broken(wheels: Mapping[str, str]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, module in LIBRARIES.items():
        if any(wheel.startswith(name) for wheel in wheels):
            try:
                importlib.import_module(module)
            except (ImportError, OSError) as error:
                reasons[name] = str(error)
    return reasons
