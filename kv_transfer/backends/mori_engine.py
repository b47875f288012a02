"""MORI-IO (AMD) over RDMA, as a `NativeEngine`. Runs on ROCm hosts only; elsewhere it is tested against a fake `mori.io`.

Facts that shape it: an error of a status is sticky; a failure proves nothing, but for a full send queue and refused
arguments, where nothing was posted; a wait that times out cancels nothing; registering zero bytes aborts the process;
in-band notifications take places in the send queue and are left off.
"""

import importlib
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from core.errors import BadRequest, ConfigError, NoCapacity, TransferFailed
from kv_transfer.api import HOST, MemoryRegion, Records
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.plan import check_bounds

QUEUE_PAIRS = 4
WORKERS = 4
HOW_TO_INSTALL = "MORI needs a ROCm host: install amd-mori from AMD's wheels there"


Status = Any
"""`TransferStatus` of the library: Succeeded(), Failed(), Code(), Message(), WaitFor(milliseconds)."""
Session = Any
"""`IOEngineSession`, of one local and one remote region: batch_read(local, remote, sizes, uid) -> Status, alive()."""


class _PackedRegion(msgspec.Struct, frozen=True, array_like=True):
    id: int
    nbytes: int
    descriptor: bytes


class _Export(msgspec.Struct, frozen=True, array_like=True):
    """The blob: the engine and its regions, each packed by the library."""

    engine: bytes
    regions: tuple[_PackedRegion, ...]


class _Peer:
    """One connected engine: its regions, and a session for each pair of regions that was used."""

    def __init__(self, descriptor: Any, regions: dict[int, tuple[int, Any]]) -> None:
        self.descriptor = descriptor
        self.regions = regions
        self.sessions: dict[tuple[int, int], Session] = {}


class MoriEngine:
    """See `NativeEngine`."""

    broken = False

    def __init__(self, spec: EngineSpec, regions: Sequence[MemoryRegion], library: ModuleType) -> None:
        self._io = library
        self._lock = threading.Lock()
        self._regions = {region.id: region for region in regions}
        self._peers: dict[int, _Peer] = {}
        self._reads: dict[int, Any] = {}
        """A Status, or the Outcome of a read that never had one."""
        self._last = 0
        self._engine: Any = library.IOEngine(spec.name, library.IOEngineConfig(spec.host, 0))
        config = library.RdmaBackendConfig(
            qp_per_transfer=QUEUE_PAIRS,
            post_batch_size=-1,
            num_worker_threads=WORKERS,
            poll_cq_mode=library.PollCqMode.POLLING,
            enable_notification=False,
        )
        try:
            self._engine.create_backend(library.BackendType.RDMA, config)
            self._memory = {region.id: self._register(region) for region in regions}
        except RuntimeError as error:
            raise ConfigError(f"MORI cannot work here: {error}") from error

    def export(self) -> bytes:
        regions = tuple(_PackedRegion(i, region.nbytes, self._memory[i].pack()) for i, region in self._regions.items())
        return msgspec.msgpack.encode(_Export(self._engine.get_engine_desc().pack(), regions))

    def connect(self, blob: bytes, timeout_s: float) -> int:
        del timeout_s  # connections are made by the first read
        try:
            export = msgspec.msgpack.decode(blob, type=_Export)
            descriptor = self._io.EngineDesc.unpack(export.engine)
            regions = {r.id: (r.nbytes, self._io.MemoryDesc.unpack(r.descriptor)) for r in export.regions}
            self._engine.register_remote_engine(descriptor)
        except (msgspec.DecodeError, msgspec.ValidationError, RuntimeError, ValueError) as error:
            raise TransferFailed(f"the peer's MORI description cannot be used: {error}") from error
        with self._lock:
            self._last += 1
            self._peers[self._last] = _Peer(descriptor, regions)
            return self._last

    def disconnect(self, peer: int) -> None:
        with self._lock:
            gone = self._peers.pop(peer, None)
            if gone is None:
                return
            gone.sessions.clear()
            if all(gone.descriptor.key != other.descriptor.key for other in self._peers.values()):
                self._engine.deregister_remote_engine(gone.descriptor)

    def post(self, peer: int, records: Records) -> int:
        with self._lock:
            source = self._peers.get(peer)
            if source is None:
                raise TransferFailed("the peer was disconnected")
            target = self._regions.get(records.target_region)
            if target is None or records.source_region not in source.regions:
                raise BadRequest(f"there is no region {records.target_region} here or {records.source_region} there")
            check_bounds(records, source.regions[records.source_region][0], target.nbytes)
            read = _post(self._session(source, records), records, self._engine.allocate_transfer_uid())
            self._last += 1
            self._reads[self._last] = read
            return self._last

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        status = self._reads[ticket]
        outcome = status if isinstance(status, Outcome) else self._look(status, timeout_s)
        if outcome is not None:
            del self._reads[ticket]
        return outcome

    def close(self) -> None:
        """The library stops its workers and queue pairs with its last reference."""
        with self._lock:
            self._peers.clear()
            self._memory.clear()
            self._reads = {ticket: Outcome("the MORI engine was destroyed") for ticket in self._reads}
            self._engine = None

    def _register(self, region: MemoryRegion) -> Any:
        if region.nbytes <= 0:
            # The library would end the process.
            raise ConfigError(f"KV region {region.id} is empty")
        kinds = self._io.MemoryLocationType
        kind = kinds.CPU if region.device == HOST else kinds.GPU
        return self._engine.register_memory(region.address, region.nbytes, region.device, kind)

    def _session(self, source: _Peer, records: Records) -> Session:
        pair = (records.target_region, records.source_region)
        session = source.sessions.get(pair)
        if session is None or not session.alive():
            # A queue pair in error stays so for good; only a new session works again.
            session = self._engine.create_session(self._memory[pair[0]], source.regions[pair[1]][1])
            if session is None:
                raise TransferFailed("MORI opens no session with the peer")
            source.sessions[pair] = session
        return session

    def _look(self, status: Status, timeout_s: float) -> Outcome | None:
        if timeout_s > 0:
            status.WaitFor(int(timeout_s * 1000))
        if status.Succeeded():
            return Outcome()
        if not status.Failed():
            return None
        proven = _queue_was_full(status) or status.Code() == self._io.StatusCode.ERR_INVALID_ARGS
        return Outcome(f"MORI failed a read: {status.Message()}", proven)


def _post(session: Session, records: Records, uid: int) -> Any:
    if not len(records.nbytes):
        return Outcome()
    columns = (records.target_offsets.tolist(), records.source_offsets.tolist(), records.nbytes.tolist())
    try:
        status = session.batch_read(*columns, uid)
    except RuntimeError as error:
        return Outcome(f"MORI broke while a read was posted: {error}", proven=False)
    if status.Failed() and _queue_was_full(status):
        raise NoCapacity("MORI's send queue is full")
    return status


def _queue_was_full(status: Status) -> bool:
    return "sq full" in status.Message().lower()


def load_library() -> ModuleType:
    """Return `mori.io`; raises ConfigError where it cannot be loaded."""
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise ConfigError(f"MORI cannot be loaded ({error}); {HOW_TO_INSTALL}") from error


def open_engine(spec: EngineSpec, regions: Sequence[MemoryRegion]) -> MoriEngine:
    """Open an engine; raises ConfigError where the library cannot be loaded or finds no adapter."""
    return MoriEngine(spec, regions, load_library())
