"""The verified read that proves a connection before it is used: a page whose bytes tell which incarnation answered.

A source exports one page beside its pools; a destination reads it with the transport's ordinary reads and compares. So
the cost of a first read is paid here, and a transport that connects but moves nothing, or somebody else's bytes, is
found before a hand-over depends on it. Also the envelope that a transport's export travels in.
"""

import asyncio
import hashlib
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from core.clock import Clock
from core.errors import TransferFailed
from core.ids import Incarnation, LeaseId, TransferId, fresh_incarnation
from kv_transfer.api import HOST, I64, MemoryRegion, Peer, Records, SourceGuard
from kv_transfer.memory import allocate, region_view
from kv_transfer.reader import Reader, ReadGroup

PROBE_BYTES = 4096
PROBE_LEASE = LeaseId(0)
"""Under which the page may be read at any time; leases are numbered from 1."""
MAX_BLOB_BYTES = 1 << 20
_SLOTS = 64


class SealedExport(msgspec.Struct, frozen=True, array_like=True):
    """What a transport exports as it crosses the control link: some libraries are harmed for good by a damaged blob."""

    length: int
    crc32: int
    probe_region: int
    blob: bytes


def seal(blob: bytes, probe_region: int) -> bytes:
    """Return the envelope of a transport's export."""
    return msgspec.msgpack.encode(SealedExport(len(blob), zlib.crc32(blob), probe_region, blob))


def unseal(data: bytes) -> SealedExport:
    """Open an envelope; raises TransferFailed if the blob is not what was sealed."""
    try:
        sealed = msgspec.msgpack.decode(data, type=SealedExport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransferFailed(f"the peer's transport description cannot be read: {error}") from error
    if len(sealed.blob) > MAX_BLOB_BYTES:
        raise TransferFailed(f"the peer's transport description has {len(sealed.blob)} bytes")
    if sealed.length != len(sealed.blob) or sealed.crc32 != zlib.crc32(sealed.blob):
        raise TransferFailed("the peer's transport description was damaged on its way")
    return sealed


def probe_bytes(incarnation: Incarnation) -> bytes:
    """Return the page of an incarnation: nobody else's, and nothing that memory holds by chance."""
    return hashlib.shake_256(b"tandem probe " + incarnation.encode()).digest(PROBE_BYTES)


class ProbePage:
    """The source's page. Made before its transports, closed after them."""

    def __init__(self, incarnation: Incarnation, regions: Sequence[MemoryRegion], directory: str) -> None:
        # Beside pools on a GPU too: what serves those serves shared segments as well.
        shared = directory if any(region.shared_name or region.device != HOST for region in regions) else ""
        # A segment is named by an incarnation, and the pools have taken ours.
        self._memory = allocate([PROBE_BYTES], incarnation=fresh_incarnation(), directory=shared, what="probe page")
        region = self._memory.regions[0]
        self.region = MemoryRegion(
            id=1 + max((region.id for region in regions), default=-1),
            address=region.address,
            nbytes=PROBE_BYTES,
            writable=True,
            shared_name=region.shared_name,
        )
        region_view(self.region)[:] = np.frombuffer(probe_bytes(incarnation), np.uint8)

    def close(self) -> None:
        """Unmap; after every transport is destroyed."""
        self._memory.close()


class ProbeGuard:
    """Lets anybody who is connected read the page, and asks the leases for the rest. Any thread."""

    def __init__(self, leases: SourceGuard, probe_region: int) -> None:
        self._leases = leases
        self._probe_region = probe_region

    def readable(self, lease: LeaseId, region: int, offsets: I64, nbytes: I64) -> bool:
        if region == self._probe_region:
            # Bounds are checked against the region, whose every byte is public to peers.
            return lease == PROBE_LEASE
        return self._leases.readable(lease, region, offsets, nbytes)


class Prober:
    """The destination's side. One event loop; a place that a read may still write is not used again before its proof."""

    def __init__(self, regions: Sequence[MemoryRegion], clock: Clock) -> None:
        self._memory = allocate([_SLOTS * PROBE_BYTES], incarnation=fresh_incarnation(), what="probe buffer")
        self.region = MemoryRegion(
            id=1 + max((region.id for region in regions), default=-1),
            address=self._memory.regions[0].address,
            nbytes=_SLOTS * PROBE_BYTES,
            writable=True,
        )
        self._bytes = region_view(self.region)
        self._clock = clock
        self._free = list(range(_SLOTS))

    def prove(self, pages: Sequence[int]) -> None:
        """As `MemoryOwner`: the quarantine gives places back."""
        self._free.extend(pages)

    async def verify(self, reader: Reader, peer: Peer, source_region: int, timeout_s: float) -> float:
        """Read the peer's page and compare; returns seconds. Raises TransferFailed if it does not come or differs."""
        if not self._free:
            raise TransferFailed("too many connections are being proven at once")
        slot, start, failures = self._free.pop(), self._clock.now(), list[Exception]()
        at = slot * PROBE_BYTES
        self._bytes[at : at + PROBE_BYTES] = 0
        group = ReadGroup(TransferId("probe"), PROBE_LEASE, (slot,), self, failures.append, _nothing, counted=False)
        one = np.array([PROBE_BYTES], np.int64)
        records = Records(source_region, self.region.id, np.zeros(1, np.int64), np.array([at], np.int64), one)
        try:
            async with asyncio.timeout(timeout_s):
                await reader.post(peer, [records], group)
                await reader.landed(group)
            got = self._bytes[at : at + PROBE_BYTES].tobytes()
        except TimeoutError:
            raise TransferFailed(f"a read of {PROBE_BYTES} bytes did not end within {timeout_s:g} s") from None
        finally:
            if not reader.abandon(group):
                self._free.append(slot)
        if failures:
            raise TransferFailed(f"a read of {PROBE_BYTES} bytes failed: {failures[0]}")
        if got != probe_bytes(peer.info.incarnation):
            raise TransferFailed("the bytes that came are not those of the worker that we meant")
        return self._clock.now() - start

    def close(self) -> None:
        """Unmap; after every transport is destroyed."""
        self._memory.close()


def _nothing() -> None:
    """Nobody waits for the proof of a probe."""
