"""The serving side of hand-overs: composes the lease desk, the announcer and the serving transports of one worker.

Lives on the worker's event loop. The engine's events come in by method calls; what it must do goes out through
`SourceHost`. Bytes are served by the transports' own threads under the lease table.
"""

import asyncio
from collections.abc import Callable, Sequence

from core.aio import OnCrash, Tasks
from core.clock import Clock
from core.errors import Draining, InvariantError, LeaseLost, TandemError
from core.handover import Final, FromP, TokenLogprobs
from core.ids import Incarnation
from core.kv import KVLayout, PageRef
from core.request import NO_FLOORS, Floors
from kv_transfer.announcer import Announcer
from kv_transfer.api import MemoryRegion, SourceHost, TransportOpener
from kv_transfer.config import TransferConfig
from kv_transfer.device import Cuda
from kv_transfer.lease import LeaseTable
from kv_transfer.lease_desk import LeaseDesk, failed_message
from kv_transfer.memory import is_on_device
from kv_transfer.probe import ProbePage
from kv_transfer.serving import Serving
from kv_transfer.source_link import Identity, SourceLink
from kv_transfer.source_transfer import SourceTransfer
from kv_transfer.ticket import LeaseEvent


class Source:
    """One per worker that prefills for others. `start` before use, `close` before the memory goes."""

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
        on_crash: OnCrash | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        """`cuda` moves the bytes of regions on a device, for digests; needed if there are such."""
        self._config = config
        self._opener = opener
        # The reaper is the only one who unpins what a lost peer held: without it this process is of no use.
        self._tasks = Tasks(on_crash)
        self._serving: Serving | None = None
        self._probe = ProbePage(incarnation, regions, config.segment_directory)
        self._leases = LeaseTable(
            layout=layout, clock=clock, max_per_peer=config.max_leases_per_peer, orphan_ttl_s=config.orphan_ttl_s
        )
        self._on_device = is_on_device(regions)
        self._announcer = Announcer(layout, regions, self._tasks, cuda)
        self._desk = LeaseDesk(
            identity=Identity(incarnation=incarnation, fingerprint=fingerprint, layout=layout),
            config=config,
            host=host,
            leases=self._leases,
            tasks=self._tasks,
            exports=self.exports,
        )

    async def start(self) -> None:
        """Open the transports (listeners bind here) and the reaper; raises ConfigError."""
        self._serving = Serving(
            self._config.transports, self._opener, self._leases, self._probe.region, on_device=self._on_device
        )
        self._tasks.spawn(self._reap(), name="lease reaper")

    def exports(self) -> tuple[tuple[str, bytes], ...]:
        """(transport, blob) of every transport that is served, in order of preference."""
        assert self._serving is not None, "start first"
        return self._serving.exports()

    def open_link(self, send: Callable[[FromP], None]) -> SourceLink:
        """Serve a new control link; `send` must neither block nor raise."""
        return SourceLink(self._desk, send)

    def drain(self) -> None:
        """Refuse new hand-overs; the leases that live go on until taken or expired."""
        self._desk.draining = True

    @property
    def num_leases(self) -> int:
        """Leases that have not been ended."""
        return len(self._leases)

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        gauges = {"leases": float(len(self._leases)), "leased_pages": float(self._leases.num_pages)}
        served = self._serving.statistics() if self._serving is not None else {}
        return self._desk.counters.snapshot() | gauges | served

    async def close(self) -> None:
        """End all leases and destroy the transports; afterwards nobody reads our memory through them. Idempotent."""
        self.drain()
        await self._tasks.close()
        self._desk.end_all(Draining("the prefill worker is going away"))
        self._announcer.close()
        if self._serving is not None:
            await self._serving.close()
        self._probe.close()

    def chunk_final(
        self, seq: int, start: int, end: int, pages: tuple[PageRef, ...], hits: tuple[int, ...] = ()
    ) -> None:
        """Engine event, on the loop: pages of tokens [start, end) of a source sequence are final, in order of start.

        `hits` are the replay hits that the sequence's pages are computed behind.
        """
        transfer = self._desk.find(seq, lambda: self.chunk_final(seq, start, end, pages, hits))
        if transfer is None or not transfer.machine.move(LeaseEvent.CHUNK):
            return
        transfer.note_hits(hits)
        message = transfer.chunk(start, end, pages)
        if message is None:
            return
        if self._leases.extend(transfer.lease, [ref.page for ref in message.pages]):
            self._announcer.announce(transfer, transfer.link, message)
        else:
            self._lapsed(transfer)

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
        floors: Floors = NO_FLOORS,
    ) -> None:
        """Engine event, on the loop: the prompt is in KV and its first token is chosen; all chunks were told before."""
        self._final(
            seq,
            Final(
                num_tokens=num_tokens,
                num_chunks=0,
                first_tokens=first_tokens,
                logprobs=logprobs,
                num_cached_tokens=num_cached_tokens,
                finish=finish,
                row=row,
                row_generation=row_generation,
                floors=floors,
            ),
        )

    def failed(self, seq: int, error: TandemError) -> None:
        """Engine event, on the loop: a source sequence ended badly."""
        transfer = self._desk.find(seq, lambda: self.failed(seq, error))
        if transfer is not None:
            self._desk.end(transfer, LeaseEvent.FAILED, failed_message(transfer, error))

    def _final(self, seq: int, aux: Final) -> None:
        transfer = self._desk.find(seq, lambda: self._final(seq, aux))
        if transfer is None or not transfer.machine.move(LeaseEvent.PREFILLED):
            return
        if transfer.announced_end < aux.num_tokens:
            error = InvariantError(f"chunks cover {transfer.announced_end} of {aux.num_tokens} tokens")
            self._desk.end(transfer, LeaseEvent.FAILED, failed_message(transfer, error))
        elif self._leases.cover_row(transfer.lease, aux.row):
            self._announcer.announce(transfer, transfer.link, transfer.final(aux))
        else:
            self._lapsed(transfer)

    def _lapsed(self, transfer: SourceTransfer) -> None:
        error = LeaseLost("the lease lapsed before the prompt was computed")
        self._desk.end(transfer, LeaseEvent.EXPIRE, failed_message(transfer, error))

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            self._desk.expire()
