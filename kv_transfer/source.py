"""The serving side of hand-overs: one `Source` per worker that prefills for others."""

from collections.abc import Callable, Sequence

from core.clock import Clock
from core.errors import TandemError
from core.handover import FromD, FromP, TokenLogprobs
from core.ids import Incarnation
from core.kv import KVLayout, PageRef
from kv_transfer.api import MemoryRegion, SourceHost, TransportOpener
from kv_transfer.config import TransferConfig


class SourceLink:
    """The source's end of one control link."""

    async def handle(self, message: FromD) -> None:
        """Handle one message; answers go to `send`. Raises `NamespaceMismatch`: close the stream with it."""
        raise NotImplementedError

    def closed(self) -> None:
        """The stream ended: all its leases end. Idempotent."""
        raise NotImplementedError


class Source:
    """Grants leases, announces pages, answers releases. Lives on one event loop."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        incarnation: Incarnation,
        fingerprint: bytes,
        layout: KVLayout,
        regions: Sequence[MemoryRegion],
        host: SourceHost,
        opener: TransportOpener,
        clock: Clock,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Open the transports (listeners bind here) and the reaper; raises ConfigError."""
        raise NotImplementedError

    def open_link(self, send: Callable[[FromP], None]) -> SourceLink:
        """Serve a new control link; `send` must not block."""
        raise NotImplementedError

    def chunk_final(self, seq: int, start: int, end: int, pages: tuple[PageRef, ...]) -> None:
        """Engine event: pages of tokens [start, end) are final. Call on the loop."""
        raise NotImplementedError

    def prefilled(
        self,
        seq: int,
        *,
        num_tokens: int,
        first_tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        num_cached_tokens: int,
        finish: str,
        row: int,
        row_generation: int,
    ) -> None:
        """Engine event: the prompt is in KV and the first token is chosen. Call on the loop."""
        raise NotImplementedError

    def failed(self, seq: int, error: TandemError) -> None:
        """Engine event: the sequence ended badly. Call on the loop."""
        raise NotImplementedError

    def drain(self) -> None:
        """Refuse new hand-overs; the leases that live go on until taken or expired."""
        raise NotImplementedError

    @property
    def num_leases(self) -> int:
        """Leases that live."""
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all leases and destroy the transports."""
        raise NotImplementedError
