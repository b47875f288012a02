"""The transports through which a source's memory is read: opened together, exported, destroyed together."""

import asyncio
import logging
from collections.abc import Sequence

from core.errors import ConfigError, TransferFailed
from kv_transfer.api import MemoryRegion, SourceGuard, Transport, TransportOpener
from kv_transfer.handshake import expand
from kv_transfer.probe import ProbeGuard, seal
from kv_transfer.statistics import transport_statistics

logger = logging.getLogger(__name__)


class Serving:
    """Open after construction until `close`."""

    def __init__(
        self,
        configured: Sequence[str],
        opener: TransportOpener,
        leases: SourceGuard,
        probe: MemoryRegion,
        *,
        on_device: bool = False,
    ) -> None:
        """`on_device`: the pools are on a GPU, which decides what ``auto`` stands for."""
        self._probe = probe
        guard = ProbeGuard(leases, probe.id)
        self._transports: dict[str, Transport] = {}
        self._served: list[str] = []
        names = expand(configured, on_device=on_device)
        for name in names:
            try:
                self._open(name, opener, guard)
            except ConfigError as error:
                if name in configured:
                    self.destroy()
                    raise
                # The rest is slower by far: what was expected to work here must not fail in silence.
                level = logging.WARNING if name == names[0] else logging.INFO
                logger.log(level, "KV transport %s is not served: %s", name, error)
        if not self._served:
            raise ConfigError(f"none of the KV transports {', '.join(configured)} can be served here")
        logger.info("serving KV over %s", ", ".join(self._served))

    def exports(self) -> tuple[tuple[str, bytes], ...]:
        """(transport, sealed blob) in order of preference, without those whose engine is just being opened again."""
        exports: list[tuple[str, bytes]] = []
        for name in self._served:
            try:
                exports.append((name, seal(self._transports[name].export().blob, self._probe.id)))
            except TransferFailed as error:
                logger.warning("KV transport %s is not served for the moment: %s", name, error)
        return tuple(exports)

    def statistics(self) -> dict[str, float]:
        """What each transport counts itself, by ``name_transport``."""
        return transport_statistics(self._transports)

    async def close(self) -> None:
        """Destroy all transports without blocking the loop; afterwards nobody reads through them."""
        await asyncio.to_thread(self.destroy)

    def destroy(self) -> None:
        """As `close`, blocking."""
        for transport in self._transports.values():
            transport.destroy()

    def _open(self, name: str, opener: TransportOpener, guard: SourceGuard) -> None:
        transport = opener.open(name, guard, _ignore)
        self._transports[name] = transport
        transport.register(self._probe)
        transport.export()
        self._served.append(name)


def _ignore() -> None:
    """A serving transport has no operations of its own."""
