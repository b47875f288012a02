"""A `NativeEngine` over one NIXL agent with the UCX backend.

What the library does not promise is not relied on: releasing a handle stops nothing, deregistering stops nothing, and a
handle that is not over is kept until the agent is destroyed, which is the only fence within a process.
"""

import gc
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import psutil

from core.clock import Clock, SystemClock
from core.errors import BadRequest, ConfigError, TransferFailed
from kv_transfer.api import HOST, I64, MemoryRegion, Records
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.backends.nixl_library import Nixl

RDMA_SETTLE_S = 5.0
"""A network card may still write what it had accepted when the peer was declared dead."""
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
LOOKS = 16
"""A waiting read is looked at again after this part of the time that it has waited, because looking moves its bytes."""
MAX_LISTS = 64
"""Prepared lists kept for a peer; the oldest goes."""
_HOST_MEMORY, _GPU_MEMORY = "DRAM", "VRAM"


class NixlExport(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs of a serving agent. Regions are (id, address, bytes, device)."""

    agent: str
    pid: int
    """Of the process that holds the memory."""
    metadata: bytes
    regions: tuple[tuple[int, int, int, int], ...]


@dataclass(slots=True, eq=False)
class _Remote:
    """A connected agent. Two connections to one agent share what the library knows of it."""

    export: NixlExport
    addresses: dict[int, list[int]]
    """(address, bytes, device) of each region."""
    users: int = 0
    lists: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """Prepared strided lists by (region, record bytes, first offset modulo record bytes)."""


@dataclass(slots=True, eq=False)
class _Read:
    handle: Any
    outcome: Outcome | None = None
    over_at: float = 0.0
    """When an outcome that needs to settle becomes true."""


class NixlEngine:
    """See `NativeEngine`. Options: ``lane`` is ``any``, ``cma``, ``cuda``, ``rdma`` or ``tcp`` (nothing else than sockets)."""

    def __init__(self, spec: EngineSpec, regions: Sequence[MemoryRegion], library: Nixl, clock: Clock) -> None:
        self._library = library
        self._clock = clock
        self._lane = spec.options.get("lane", "tcp")
        self._regions = {region.id: region for region in regions}
        self._remotes: dict[str, _Remote] = {}
        self._peers: dict[int, _Remote] = {}
        self._reads: dict[int, _Read] = {}
        self._undead: list[Any] = []
        """Handles of reads without proof: releasing one would stop nothing and free what the library still uses."""
        self._local_lists: dict[tuple[int, int, int], Any] = {}
        self._numbers = itertools.count(1)
        self._book = threading.RLock()
        """Around every call: STRICT agents serialize them anyway, and `close` must not meet one."""
        self._agent: Any = library.agent(spec.name, serves=spec.serves)
        self._name = spec.name
        self._call(self._agent.create_backend, "UCX", backend_options(self._lane, spec.host))
        # The descriptors are the registration; the memory is the caller's, who closes us first.
        self._registered: list[Any] = []
        for kind in (_HOST_MEMORY, _GPU_MEMORY):
            memory = [(r.address, r.nbytes, _device(r.device), "") for r in regions if _kind(r.device) == kind]
            if memory:
                self._registered.append(self._call(self._agent.register_memory, memory, kind))

    @property
    def broken(self) -> bool:
        return False

    def export(self) -> bytes:
        regions = tuple((r.id, r.address, r.nbytes, r.device) for r in self._regions.values())
        metadata = self._call(self._agent.get_agent_metadata)
        return msgspec.msgpack.encode(NixlExport(self._name, os.getpid(), metadata, regions))

    def connect(self, blob: bytes, timeout_s: float) -> int:
        del timeout_s  # nothing waits here: the connection is made by the first read
        export = decode_export(blob)
        with self._book:
            remote = self._remotes.get(export.agent)
            if remote is None:
                name = self._call(self._agent.add_remote_agent, export.metadata)
                if name.decode() != export.agent:
                    raise TransferFailed("the peer's NIXL metadata names another agent")
                addresses = {region: place for region, *place in export.regions}
                remote = self._remotes[export.agent] = _Remote(export, addresses)
            remote.users += 1
            number = next(self._numbers)
            self._peers[number] = remote
            return number

    def disconnect(self, peer: int) -> None:
        with self._book:
            remote = self._peers.pop(peer, None)
            if remote is None:
                return
            remote.users -= 1
            if not remote.users and self._agent is not None:
                del self._remotes[remote.export.agent]
                # Prepared lists die with the peer's metadata: the library refuses them after a reload.
                for prepared in remote.lists.values():
                    self._call(prepared.release)
                self._call(self._agent.remove_remote_agent, remote.export.agent)

    def post(self, peer: int, records: Records) -> int:
        with self._book:
            remote = self._peers.get(peer)
            if remote is None or self._agent is None:
                raise TransferFailed("the NIXL peer was disconnected")
            if records.source_region not in remote.addresses or records.target_region not in self._regions:
                raise BadRequest(f"there is no region {records.source_region} there or {records.target_region} here")
            read = _Read(self._prepare(remote, records))
            number = next(self._numbers)
            self._reads[number] = read
            self._step(read, self._agent.transfer)
            return number

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        read = self._reads[ticket]
        start = self._clock.now()
        end = start + timeout_s
        while True:
            with self._book:
                if read.outcome is None:
                    self._step(read, self._agent.check_xfer_state)
                now = self._clock.now()
                if read.outcome is not None and now >= read.over_at:
                    del self._reads[ticket]
                    if not read.outcome.proven:
                        self._undead.append(read.handle)
                    return read.outcome
            if now >= end:
                return None
            pause = min(max(MIN_PAUSE_S, (now - start) / LOOKS), MAX_PAUSE_S)
            time.sleep(min(pause, end - now))

    def close(self) -> None:
        with self._book:
            if self._agent is None:
                return
            agent = weakref.ref(self._agent.agent) if _weak(self._agent.agent) else None
            for remote in self._remotes.values():
                remote.lists.clear()
            self._local_lists.clear()
            for read in self._reads.values():
                # Only now, because the agent goes with it: a release by itself stops nothing.
                read.handle = None
                read.over_at = 0.0
                read.outcome = read.outcome or Outcome("the NIXL agent was destroyed")
            self._undead.clear()
            self._registered = []
            self._agent = None
        gc.collect()
        assert agent is None or agent() is None, "somebody holds the NIXL agent, so it was not destroyed"

    def _step(self, read: _Read, call: Callable[[Any], str]) -> None:
        """Post or look; errors of the library become the outcome."""
        try:
            state = call(read.handle)
        except self._library.over as error:
            read.outcome = Outcome(f"the peer is gone ({type(error).__name__})")
            read.over_at = self._clock.now() + (RDMA_SETTLE_S if self._lane == "rdma" else 0.0)
        except self._library.errors as error:
            read.outcome = Outcome(f"NIXL failed the read ({type(error).__name__})", proven=False)
        else:
            if state == "DONE":
                read.handle.release()
                read.outcome = Outcome()
            elif state != "PROC":
                read.outcome = Outcome(f"NIXL reports {state}", proven=False)

    def _prepare(self, remote: _Remote, records: Records) -> Any:
        """Return a transfer handle: by index into prepared lists if the records are a grid, else by descriptors."""
        address, nbytes, device = remote.addresses[records.source_region]
        target = self._regions[records.target_region]
        size = int(records.nbytes[0])
        grids = bool((records.nbytes == size).all()) and len(records.nbytes) > 1
        source_index, source_phase = _index(records.source_offsets, size) if grids else (None, 0)
        target_index, target_phase = _index(records.target_offsets, size) if grids else (None, 0)
        if source_index is not None and target_index is not None:
            source_key = (records.source_region, size, source_phase)
            target_key = (records.target_region, size, target_phase)
            far = self._list(remote.lists, source_key, remote.export.agent, (address, nbytes, device))
            here = (target.address, target.nbytes, target.device)
            near = self._list(self._local_lists, target_key, "NIXL_INIT_AGENT", here)
            return self._call(self._agent.make_prepped_xfer, "READ", near, target_index, far, source_index)
        far = self._descriptors(address, records.source_offsets, records.nbytes, device)
        near = self._descriptors(target.address, records.target_offsets, records.nbytes, target.device)
        return self._call(self._agent.initialize_xfer, "READ", near, far, remote.export.agent)

    def _list(
        self, lists: dict[tuple[int, int, int], Any], key: tuple[int, int, int], agent: str, place: tuple[int, int, int]
    ) -> Any:
        prepared = lists.get(key)
        if prepared is None:
            (_, size, phase), (address, nbytes, device) = key, place
            while len(lists) >= MAX_LISTS:
                self._call(lists.pop(next(iter(lists))).release)
            strided = np.array([[address + phase, size, _device(device), size, (nbytes - phase) // size]], np.uint64)
            prepared = lists[key] = self._call(self._agent.prep_xfer_dlist, agent, strided, _kind(device))
        return prepared

    def _descriptors(self, address: int, offsets: I64, nbytes: I64, device: int) -> Any:
        rows = np.zeros((len(offsets), 3), np.uint64)
        rows[:, 0] = offsets + address
        rows[:, 1] = nbytes
        rows[:, 2] = _device(device)
        return self._call(self._agent.get_xfer_descs, rows, _kind(device))

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call the library where nothing is posted. It answers some mistakes with None and a line in its log."""
        try:
            result = function(*arguments)
        except self._library.errors as error:
            raise TransferFailed(f"NIXL: {getattr(function, '__name__', 'call')}: {type(error).__name__}") from error
        if result is None and getattr(function, "__name__", "") in _NEVER_NONE:
            raise TransferFailed(f"NIXL: {function.__name__} refused its arguments")
        return result


_NEVER_NONE = ("register_memory", "get_xfer_descs", "prep_xfer_dlist", "make_prepped_xfer", "initialize_xfer")


def _index(offsets: I64, size: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]] | None, int]:
    """Return (indices, phase) if all offsets are phase + index * size, else (None, 0)."""
    phase = int(offsets[0]) % size
    index, rest = np.divmod(offsets - phase, size)
    return (index.astype(np.int32), phase) if not rest.any() and int(index.min()) >= 0 else (None, 0)


def _kind(device: int) -> str:
    return _HOST_MEMORY if device == HOST else _GPU_MEMORY


def _device(device: int) -> int:
    return 0 if device == HOST else device


def decode_export(blob: bytes) -> NixlExport:
    """Read the description of a serving agent; raises TransferFailed."""
    try:
        return msgspec.msgpack.decode(blob, type=NixlExport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TransferFailed(f"the peer's NIXL description cannot be read: {error}") from error


def _weak(thing: object) -> bool:
    try:
        weakref.ref(thing)
    except TypeError:
        return False
    return True


def backend_options(lane: str, host: str) -> dict[str, str]:
    """Options of the UCX backend; its own configuration is a list of KEY=VALUE and wins over the environment."""
    engine = ["TLS=tcp"] if lane == "tcp" else []
    if lane == "cuda":
        # Where it finds no NVLink (one GPU, a guest without that view) UCX would read device memory over sockets.
        engine.append("CUDA_IPC_ENABLE_GET_ZCOPY=y")
    device = _device_of(host)
    if lane != "rdma" and device:
        # By default UCX listens on every interface, without any authentication.
        engine.append(f"NET_DEVICES={device}")
    return {"ucx_error_handling_mode": "peer", "num_workers": "1", "engine_config": ",".join(engine)}


def _device_of(host: str) -> str:
    """Return the interface that has this address; empty for the unspecified address."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - asked for by the configuration
        return ""
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"transfer.host {host} cannot be resolved: {error}") from error
    for device, addresses in psutil.net_if_addrs().items():
        if any(address.address in wanted for address in addresses):
            return device
    raise ConfigError(f"no network interface has the address {host}; set transfer.host to one of this machine's")


def open_engine(spec: EngineSpec, regions: Sequence[MemoryRegion]) -> NixlEngine:
    """Open an agent; raises ConfigError if the library is missing, too old, or cannot work here."""
    library = Nixl()
    try:
        return NixlEngine(spec, regions, library, SystemClock())
    except TransferFailed as error:
        raise ConfigError(f"NIXL {library.version} cannot be used here: {error.message}") from error
