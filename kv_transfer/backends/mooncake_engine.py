"""Mooncake's transfer engine over TCP (or RDMA where an adapter is present), as a `NativeEngine`. Handshake between peers.

Facts that shape it: a batch call that answers anything but 0 proves nothing (parts of it may still land until the engine
is destroyed); more than 1,024 descriptors, or two batches at once to one peer, overflow the lanes; after an idle gap a
good batch can fail once; any unknown protocol silently becomes TCP; nothing can be cancelled.
"""

import importlib
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol, cast

import msgspec

from core.errors import BadRequest, ConfigError, NoCapacity, TransferFailed
from kv_transfer.api import I64, MemoryRegion, Records
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.plan import check_bounds

MIN_VERSION = (0, 3, 12)
"""Older wheels report a read as complete when the last byte has left the sender, before it is applied."""
DISTRIBUTIONS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda")
MAX_DESCRIPTORS = 1024
MAX_WAITING = 64
"""Reads that may wait for one peer."""
ATTEMPTS = 3
BACK_OFF_S = 0.05
HOW_TO_INSTALL = (
    "install it with: pip install '.[mooncake]' (mooncake-transfer-engine instead of -non-cuda on a GPU host), "
    "and its system library with: apt-get install libibverbs1"
)
_NEEDED = ("initialize", "register_memory", "batch_transfer_sync_read", "get_rpc_port", "send_probe")
_INFINIBAND = Path("/sys/class/infiniband")


class Library(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. All addresses and sizes are bytes; 0 means success."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        """Start its threads and listeners."""
        ...

    def register_memory(self, address: int, nbytes: int) -> int:
        """Make a range readable by peers and writable by our reads."""
        ...

    def batch_transfer_sync_read(self, peer: str, local: list[int], remote: list[int], sizes: list[int]) -> int:
        """Read and wait, without the interpreter lock."""
        ...

    def get_rpc_port(self) -> int:
        """Return where peers reach us."""
        ...

    def send_probe(self, peer: str) -> int:
        """Ask whether a peer's handshake port answers."""
        ...


class Export(msgspec.Struct, frozen=True, array_like=True):
    """The blob: a session name (host and port) and where each region begins."""

    session: str
    regions: tuple[tuple[int, int, int], ...]
    """(region id, address in the serving process, bytes)"""


class MooncakeEngine:
    """See `NativeEngine`. One thread per peer, so that one batch of a peer is in flight at a time."""

    broken = False

    def __init__(self, spec: EngineSpec, regions: Sequence[MemoryRegion], library: Library) -> None:
        self._library: Library | None = library
        self._host = spec.host
        self._regions = {region.id: region for region in regions}
        self._changed = threading.Condition()
        self._on_over: Callable[[], None] = lambda: None
        self._outcomes: dict[int, Outcome | None] = {}
        self._peers: dict[int, _Lane] = {}
        self._last = 0
        self._start(library, spec)

    def export(self) -> bytes:
        assert self._library is not None
        regions = tuple((region.id, region.address, region.nbytes) for region in self._regions.values())
        return msgspec.msgpack.encode(Export(f"{self._host}:{self._library.get_rpc_port()}", regions))

    def connect(self, blob: bytes, timeout_s: float) -> int:
        del timeout_s  # the library has its own: 5 s to connect
        try:
            export = msgspec.msgpack.decode(blob, type=Export)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"the peer's Mooncake description cannot be read: {error}") from error
        assert self._library is not None
        if self._library.send_probe(export.session) != 0:
            raise TransferFailed(f"the Mooncake engine at {export.session} does not answer")
        with self._changed:
            self._last += 1
            self._peers[self._last] = _Lane(self._library, export, self._over)
            return self._last

    def disconnect(self, peer: int) -> None:
        with self._changed:
            lane = self._peers.pop(peer, None)
        if lane is not None:
            lane.stop()

    def post(self, peer: int, records: Records) -> int:
        lane, target = self._peers.get(peer), self._regions.get(records.target_region)
        if lane is None:
            raise TransferFailed("the peer was disconnected")
        if target is None or records.source_region not in lane.regions:
            raise BadRequest(f"there is no region {records.target_region} here or {records.source_region} there")
        base, nbytes = lane.regions[records.source_region]
        check_bounds(records, nbytes, target.nbytes)
        with self._changed:
            self._last += 1
            ticket = self._last
            self._outcomes[ticket] = None
        try:
            lane.put(ticket, records.target_offsets + target.address, records.source_offsets + base, records.nbytes)
        except NoCapacity:
            del self._outcomes[ticket]
            raise
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes[ticket] is not None, timeout_s)
            outcome = self._outcomes[ticket]
            if outcome is not None:
                del self._outcomes[ticket]
            return outcome

    def tell_over(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over

    def close(self) -> None:
        """The library ends with its last reference, and that ends what it still had queued.

        A call that hangs is waited for: up to its own timeout (`MC_TRANSFER_TIMEOUT`), a few times over.
        """
        for peer in list(self._peers):
            self.disconnect(peer)
        self._library = None
        with self._changed:
            for ticket, outcome in self._outcomes.items():
                if outcome is None or not outcome.proven:
                    self._outcomes[ticket] = Outcome("the Mooncake engine was destroyed")
            self._changed.notify_all()

    def _start(self, library: Library, spec: EngineSpec) -> None:
        protocol = spec.options.get("protocol", "tcp")
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"Mooncake would take the unknown protocol {protocol!r} for tcp; use tcp or rdma")
        if protocol == "rdma" and not has_adapter():
            raise ConfigError("Mooncake over rdma needs an RDMA adapter, and there is none; use tcp")
        if (rc := library.initialize(spec.host, "P2PHANDSHAKE", protocol, spec.options.get("device", ""))) != 0:
            raise ConfigError(f"Mooncake did not start on {spec.host} (code {rc})")
        for region in self._regions.values():
            if (rc := library.register_memory(region.address, region.nbytes)) != 0:
                raise ConfigError(f"Mooncake refused KV region {region.id} of {region.nbytes} bytes (code {rc})")

    def _over(self, ticket: int, outcome: Outcome) -> None:
        with self._changed:
            self._outcomes[ticket] = outcome
            self._changed.notify_all()
        self._on_over()


_Read = tuple[int, I64, I64, I64]


class _Lane:
    """The reads from one peer, one batch at a time, on a thread of their own."""

    def __init__(self, library: Library, export: Export, over: Callable[[int, Outcome], None]) -> None:
        self.regions: Mapping[int, tuple[int, int]] = {i: (address, nbytes) for i, address, nbytes in export.regions}
        self._session = export.session
        self._over = over
        self._reads: queue.Queue[_Read | None] = queue.Queue(MAX_WAITING)
        self._stopping = threading.Event()
        self._gone = False
        """The peer did not answer when last asked."""
        # The thread holds the only other reference to the library: it is gone when the thread is.
        self._thread = threading.Thread(target=self._loop, args=(library,), name="kv-mooncake", daemon=True)
        self._thread.start()

    def put(self, ticket: int, local: I64, remote: I64, sizes: I64) -> None:
        """Queue a read; raises NoCapacity."""
        try:
            self._reads.put_nowait((ticket, local, remote, sizes))
        except queue.Full:
            raise NoCapacity(f"{MAX_WAITING} reads wait for this peer already") from None

    def stop(self) -> None:
        """Start nothing more and wait for the batch in flight."""
        self._stopping.set()
        while self._thread.is_alive():
            try:
                self._reads.put(None, timeout=0.1)
            except queue.Full:
                continue
            break
        self._thread.join()

    def _loop(self, library: Library) -> None:
        while (read := self._reads.get()) is not None:
            ticket, *columns = read
            self._over(ticket, self._run(library, *columns))

    def _run(self, library: Library, local: I64, remote: I64, sizes: I64) -> Outcome:
        gone = f"the Mooncake engine at {self._session} is gone"
        if self._gone and library.send_probe(self._session) != 0:
            # Nothing was asked for: this read leaves nothing behind that only a fence would end.
            return Outcome(gone)
        self._gone, proven = False, True
        for first in range(0, len(sizes), MAX_DESCRIPTORS):
            part = slice(first, first + MAX_DESCRIPTORS)
            columns = (local[part].tolist(), remote[part].tolist(), sizes[part].tolist())
            for attempt in range(ATTEMPTS):
                if self._stopping.is_set():
                    return Outcome("the peer was disconnected", proven)
                if library.batch_transfer_sync_read(self._session, *columns) == 0:
                    break
                # The same bytes to the same place once more; what is still queued of this attempt may yet come.
                proven = False
                if library.send_probe(self._session) != 0:
                    self._gone = True
                    return Outcome(gone, proven)
                self._stopping.wait(BACK_OFF_S * 2**attempt)
            else:
                return Outcome(f"Mooncake failed a read {ATTEMPTS} times", proven)
        return Outcome("", proven)


def open_engine(spec: EngineSpec, regions: Sequence[MemoryRegion]) -> MooncakeEngine:
    """Open an engine; raises ConfigError, saying what to install, if the library cannot be used."""
    check_version(installed_version())
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded ({error}); {HOW_TO_INSTALL}") from error
    library = module.TransferEngine()
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        raise ConfigError(f"this Mooncake has no {', '.join(missing)}; {HOW_TO_INSTALL}")
    return MooncakeEngine(spec, regions, cast("Library", library))


def has_adapter() -> bool:
    """True if the host has an RDMA adapter: without one the library would take tcp in silence."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def installed_version() -> str:
    """Return the version of whichever distribution is installed; empty if none is."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_version(version: str) -> None:
    """Raise ConfigError unless the wheel is there and completes reads at the receiver."""
    if not version:
        raise ConfigError(f"Mooncake is not installed; {HOW_TO_INSTALL}")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < MIN_VERSION:
        raise ConfigError(f"Mooncake {version} is too old (0.3.12 or newer is needed); {HOW_TO_INSTALL}")
