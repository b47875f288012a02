"""The pulling side of hand-overs: one `Destination` per decode worker."""

from collections.abc import Sequence

from core.clock import Clock
from core.ids import Incarnation
from core.kv import KVLayout
from core.request import GenerateRequest
from kv_transfer.api import DestinationHost, LinkDialer, MemoryRegion, OnFirst, Pulled, TransportOpener
from kv_transfer.config import TransferConfig


class Destination:
    """Pulls KV pages of remote prefills into this worker's pools. Lives on one event loop."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        incarnation: Incarnation,
        fingerprint: bytes,
        layout: KVLayout,
        regions: Sequence[MemoryRegion],
        host: DestinationHost,
        dialer: LinkDialer,
        opener: TransportOpener,
        clock: Clock,
    ) -> None:
        raise NotImplementedError

    async def pull(
        self,
        *,
        request: GenerateRequest,
        seq: int,
        row: int,
        prefix_tokens: int,
        address: str,
        incarnation: Incarnation | None,
        timeout_s: float,
        on_first: OnFirst,
    ) -> Pulled:
        """Let the source at `address` prefill `request` and pull the result into sequence `seq`, row `row`.

        `on_first` is called once, on the loop, when FINAL arrives. On any error and on cancellation
        `DestinationHost.drop` has been called exactly once; after a return it never is.
        """
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel all pulls, wait for quiescence, destroy the transports. Memory may be unmapped afterwards."""
        raise NotImplementedError
