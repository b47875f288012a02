"""Numbers of KV transfer by name, for whoever exports them. Knows no metrics library."""

from collections.abc import Callable, Iterable, Mapping

from kv_transfer.api import SupportsStatistics, Transport

STAGES = ("prepare", "queue", "land", "wire", "verify", "commit")
"""Of a pull: until the lease; until the last chunk and FINAL are told and its reads are posted (``land``, a part of that,
is the last chunk's pages and reads); until everything has landed; digests and row
state; until the source's word that the lease held. Bytes that land while the source computes cost nothing of ``wire``."""
ENGINE_RESTARTS = "Native engines opened again after a crash, or a fence that proved their reads over."
WORSE_WAYS = "Connections by a slower way than the hosts allow, such as sockets where direct memory access is denied."
Observe = Callable[[str, str, float], None]
"""(stage, transport, seconds)."""


def observe_nothing(stage: str, transport: str, seconds: float) -> None:
    """For who keeps no distributions."""


class Counters:
    """Monotonic counters over a closed set of names. One thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = dict.fromkeys(names, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count; the name must be one of those given at construction."""
        self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return a copy."""
        return dict(self._values)


def transport_statistics(transports: Mapping[str, Transport]) -> dict[str, float]:
    """Return what transports count themselves, by ``counter_transport``."""
    return {
        f"{counter}_{name}": value
        for name, transport in transports.items()
        if isinstance(transport, SupportsStatistics)
        for counter, value in transport.statistics().items()
    }
