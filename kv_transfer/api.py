"""The interfaces of KV transfer: transports that move bytes, links that carry control messages, hosts that own pages.

Pull only: the owner of the destination pages starts every copy (decision A1). Addresses and layouts are numbers; no
torch, no gRPC. Units: bytes, seconds (float, monotonic). The rule that everything here serves: memory that an
operation may still write returns to its owner only after `Transport.quiesced(op)` was true.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from core.handover import FromD, FromP, TokenLogprobs
from core.ids import Incarnation, LeaseId, TransferId
from core.kv import PageRef
from core.request import NO_FLOORS, Floors, GenerateRequest

I64 = npt.NDArray[np.int64]
HOST = -1
"""As a region's device: ordinary memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do; fixed once it is open."""

    name: str
    version: str
    max_records_per_op: int
    max_bytes_per_op: int
    max_ops_in_flight_per_peer: int
    same_host_only: bool
    read_is_safe_for_source: bool
    """False if a reader's death can take the source down."""
    cancel_is_fence: bool
    """True if `SupportsCancel.cancel` bounds the time until `quiesced` by one step or frame."""
    op_scale: int = 1
    """So many times `transfer.max_bytes_per_op` make one read, where that many bytes move in the time that a read costs."""
    landing: str
    """``direct`` (into pages), ``staged`` (through a private ring) or ``auto`` (by the way to the peer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """One registered address range of this process: a pool component. Outlives every transport."""

    id: int
    address: int
    nbytes: int
    writable: bool
    shared_name: str = ""
    """Name of the shared-memory segment that holds it, if any; `shared_offset` is its start there."""
    shared_offset: int = 0
    device: int = HOST
    """Which GPU holds it; `address` is then a device address that no CPU instruction may touch."""


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one side exports for one transport. `blob` is opaque and at most 1 MiB."""

    transport: str
    incarnation: Incarnation
    blob: bytes


@dataclass(frozen=True, slots=True)
class Records:
    """A list of copies between one source region and one local region: three int64 arrays of equal length."""

    source_region: int
    target_region: int
    source_offsets: I64
    target_offsets: I64
    nbytes: I64

    @property
    def total_bytes(self) -> int:
        """Sum of all copies."""
        return int(self.nbytes.sum())


class OpState(enum.StrEnum):
    """POSTED may write; DONE and FAILED are proven over; UNPROVEN failed without proof and may still write."""

    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    UNPROVEN = "unproven"


@dataclass(slots=True)
class Op:
    """One submitted read. Owned by its transport; readers look at its state only through `poll` and `quiesced`.

    `landed_bytes` only grows and may be read from any thread: it shows progress, never completion.
    """

    id: int
    transfer: TransferId
    nbytes: int
    submitted_at: float
    state: OpState = OpState.POSTED
    error: Exception | None = None
    landed_bytes: int = 0
    tag: object = field(default=None)


class SourceGuard(Protocol):
    """Asked by the serving half of a transport, from any thread, before and between the bytes of a read."""

    def readable(self, lease: LeaseId, region: int, offsets: I64, nbytes: I64) -> bool:
        """True iff the lease lives and its page and row records cover all of those byte ranges of the region."""
        ...


class Peer(Protocol):
    """A connected source."""

    info: PeerInfo

    def disconnect(self) -> None:
        """Forget the peer. Only after its operations are closed."""
        ...


class Transport(Protocol):
    """Moves bytes from a peer's registered regions into ours. Thread-safe. Made by `kv_transfer.factory`."""

    capabilities: Capabilities

    def register(self, region: MemoryRegion) -> None:
        """Make a region known; raises ConfigError for zero length, overlap or an unusable kind of memory."""
        ...

    def export(self) -> PeerInfo:
        """Describe our regions and endpoint so that a peer can `connect`."""
        ...

    def connect(self, info: PeerInfo, timeout_s: float) -> Peer:
        """Connect to a source; raises TransferFailed (unreachable, malformed, wrong incarnation)."""
        ...

    def submit(self, peer: Peer, records: Records, transfer: TransferId, lease: LeaseId, deadline: float) -> Op:
        """Post a read and return at once. Raises BadRequest (nothing posted) or NoCapacity (nothing posted)."""
        ...

    def poll(self) -> list[Op]:
        """Return operations whose state changed since the last call; one consumer. `on_event` tells when to."""
        ...

    def quiesced(self, op: Op) -> bool:
        """True iff no byte of the operation can land any more: the only thing that may release memory."""
        ...

    def destroy(self) -> None:
        """Tear down; on return every operation of this transport is quiesced."""
        ...


class TransportOpener(Protocol):
    """Opens transports over this process's regions; `kv_transfer.factory.TransportFactory` is the shipped one.

    A reader and a server never share a transport: destroying the reader's as a fence must not silence the server.
    """

    def open(self, name: str, guard: SourceGuard | None, on_event: Callable[[], None]) -> Transport:
        """Open a transport with all regions registered; raises ConfigError if it cannot work here.

        Without a guard it serves nobody and must not be exported. `on_event` is called from any thread when `Transport.poll` has news; it must not block.
        """
        ...


@runtime_checkable
class SupportsCancel(Protocol):
    """Transports whose reads can be stopped early."""

    def cancel(self, op: Op) -> None:
        """Ask the operation to stop; never frees and never marks anything terminal by itself."""
        ...


@runtime_checkable
class SupportsStatistics(Protocol):
    """Transports that count what only they know."""

    def statistics(self) -> dict[str, float]:
        """Counters by name, from any thread."""
        ...


class ControlLink(Protocol):
    """D's end of the control stream to one P."""

    async def send(self, message: FromD) -> None:
        """Send one message; raises WorkerLost if the link is gone."""
        ...

    async def receive(self) -> FromP:
        """Wait for the next message; raises WorkerLost at the end of the stream."""
        ...

    async def close(self) -> None:
        """Close; idempotent."""
        ...


class LinkDialer(Protocol):
    """Opens control links; implemented by `core.rpc.kv_source`."""

    async def dial(self, address: str, timeout_s: float) -> ControlLink:
        """Open a link (no message sent yet); raises WorkerLost."""
        ...


class DestinationHost(Protocol):
    """The owner of destination pages, on the asyncio thread; the decode worker implements it over its engine."""

    async def land(self, seq: int, start: int, end: int) -> tuple[int, ...]:
        """Allocate LANDING pages for tokens [start, end); waits for room; raises TandemError if the request ended.

        Those pages and the row of the sequence stay its own until `drop` or until the pull returned.
        """
        ...

    def drop(self, seq: int, open_pages: Sequence[int]) -> None:
        """The transfer ended without commit; `open_pages` may still be written."""
        ...

    def prove(self, pages: Sequence[int]) -> None:
        """Those pages can no longer be written: `quiesced` was true for every operation on them."""
        ...


class SourceHost(Protocol):
    """The owner of source pages, on the asyncio thread; the prefill worker implements it over its engine."""

    async def start(self, request: GenerateRequest, timeout_s: float) -> int:
        """Queue a prompt; returns its sequence id. Raises BadRequest, NeverFits, NoCapacity, Draining."""
        ...

    def stop(self, seq: int) -> None:
        """Unpin; in any state; idempotent."""
        ...

    def epochs_unchanged(self, seq: int) -> bool:
        """True if all pages announced for the sequence are still its own; waits for nobody."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """What FINAL carried: forwarded to the client before the rest is read."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: str
    floors: Floors = NO_FLOORS
    """What the source computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A validated hand-over: everything is in our pages."""

    first: FirstTokens
    num_tokens: int
    bytes_pulled: int
    chunks: int


OnFirst = Callable[[FirstTokens], None]
AnnouncedPages = tuple[PageRef, ...]
