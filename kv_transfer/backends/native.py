"""What a native transfer library must do to carry our reads, in this process or in a sidecar: a small Protocol.

An engine either serves memory or reads into memory, and says of each read when it is proven over. It knows no leases,
no operations and no pages. An engine's module has `open_engine(spec, regions) -> NativeEngine`; it is imported by name
(`spec.module`), in the process where the engine runs.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from core.errors import ConfigError
from kv_transfer.api import MemoryRegion, Records


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to open an engine. Crosses to the sidecar as it is."""

    module: str
    """Python module with `open_engine`."""
    name: str
    """Unique for ever: one incarnation, one engine, one generation. The library's agent name."""
    host: str = "127.0.0.1"
    """The only address that listeners may bind."""
    serves: bool = False
    """True: the regions are read by others (and may be mapped read-only). False: this engine reads into them."""
    options: Mapping[str, str] = {}


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The end of one read: no error means that all bytes are there."""

    error: str = ""
    proven: bool = True
    """False: bytes of it, or of an earlier attempt at it, may still land until the engine is closed."""


class NativeEngine(Protocol):
    """One native engine. Thread-safe. Errors of the library leave it as TandemError, never as its own types."""

    @property
    def broken(self) -> bool:
        """True once it is of no use any more (its process has died); then everything it posted is proven over."""
        ...

    def export(self) -> bytes:
        """Describe the served regions and the endpoint for `connect` of another engine of this module."""
        ...

    def connect(self, blob: bytes, timeout_s: float) -> int:
        """Connect to a serving engine and return its handle; raises TransferFailed."""
        ...

    def disconnect(self, peer: int) -> None:
        """Forget a peer without open reads; idempotent."""
        ...

    def post(self, peer: int, records: Records) -> int:
        """Start a read and return its ticket. Raises BadRequest, NoCapacity or TransferFailed: nothing was posted.

        Whatever went wrong after the library was first called with it is told by `wait`, not raised.
        """
        ...

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        """Wait for the end of a read; None: not over yet. An outcome is returned once, then the ticket is gone."""
        ...

    def close(self) -> None:
        """Destroy the engine: on return no byte of any read can land any more. Idempotent."""
        ...


@runtime_checkable
class TellsOver(Protocol):
    """Engines that say by themselves when a read is over: nobody needs to look."""

    def tell_over(self, on_over: Callable[[], None]) -> None:
        """Call `on_over` from any thread whenever `wait` of some read has an outcome; it must not block."""
        ...


def open_engine(spec: EngineSpec, regions: Sequence[MemoryRegion]) -> NativeEngine:
    """Open an engine in this process; raises ConfigError if it cannot work here."""
    try:
        module = importlib.import_module(spec.module)
    except ImportError as error:
        raise ConfigError(f"the native transport {spec.module} cannot be loaded: {error}") from error
    return module.open_engine(spec, regions)
