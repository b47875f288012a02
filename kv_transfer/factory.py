"""From a transport's name to an open transport: the table of backends, imported only when named.

A backend module has `open_transport(settings, guard, clock, on_event) -> Transport`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence

from core.clock import Clock
from core.errors import ConfigError
from kv_transfer.api import MemoryRegion, SourceGuard, Transport
from kv_transfer.device import Cuda
from kv_transfer.settings import TransportSettings

BACKENDS: Mapping[str, str] = {
    "cuda-ipc": "kv_transfer.backends.cuda_ipc",
    "loopback": "kv_transfer.backends.loopback",
    "mooncake": "kv_transfer.backends.mooncake",
    "mori": "kv_transfer.backends.mori",
    "nixl": "kv_transfer.backends.nixl",
    "shm": "kv_transfer.backends.shm",
    "tcp": "kv_transfer.backends.tcp",
}

CUDA_DRIVER = "kv_transfer.backends.cuda_driver"

NATIVE = ("mooncake", "mori", "nixl")
"""Those over a native library, which count what they do about its failures."""
SHARED_MEMORY = frozenset({"mooncake", "nixl", "shm"})
"""Those whose sources let another process map their pools: a reader, or their own sidecar."""


def check_transports(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that no backend has: asked at start, long before the first transport is opened."""
    for name in names:
        if name != "auto" and name not in BACKENDS:
            raise ConfigError(f"there is no KV transport {name!r}; choose from auto, {', '.join(sorted(BACKENDS))}")


def open_transport(
    name: str, settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> Transport:
    """Open a transport by name; raises ConfigError for an unknown name or a backend that cannot work here."""
    check_transports((name,))
    return importlib.import_module(BACKENDS[name]).open_transport(settings, guard, clock, on_event)


def open_cuda() -> Cuda:
    """Return the CUDA driver of this host; raises ConfigError where there is none, or no device."""
    return importlib.import_module(CUDA_DRIVER).CudaDriver()


class TransportFactory:
    """The shipped `TransportOpener`: opens by name and registers this process's regions."""

    def __init__(self, settings: TransportSettings, regions: Sequence[MemoryRegion], clock: Clock) -> None:
        self._settings = settings
        self._regions = tuple(regions)
        self._clock = clock

    def open(self, name: str, guard: SourceGuard | None, on_event: Callable[[], None]) -> Transport:
        transport = open_transport(name, self._settings, guard, self._clock, on_event)
        for region in self._regions:
            transport.register(region)
        return transport
