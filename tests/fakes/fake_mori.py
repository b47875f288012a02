"""A `mori.io` without RDMA: the API that the adapter uses, over memory of this process, with switches for its faults.

`FakeMori()` is one library; its engines find each other by key. A thread of each engine completes statuses, as the
library's workers do; `faults` says what the next posts run into.
"""

import ctypes
import enum
import itertools
import pickle
import queue
import threading
import time
import weakref
from dataclasses import dataclass, field


class StatusCode(enum.Enum):
    SUCCESS = 0
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14


class MemoryLocationType(enum.Enum):
    CPU = 0
    GPU = 1


class BackendType(enum.Enum):
    RDMA = 1


class PollCqMode(enum.Enum):
    POLLING = 0
    EVENT = 1


@dataclass
class Packed:
    def pack(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def unpack(data: bytes):
        try:
            return pickle.loads(data)
        except Exception as error:
            raise RuntimeError("unpack failed") from error


@dataclass
class EngineDesc(Packed):
    key: str
    host: str


@dataclass
class MemoryDesc(Packed):
    engine: str
    data: int
    size: int


@dataclass
class IOEngineConfig:
    host: str
    port: int = 0


@dataclass
class RdmaBackendConfig:
    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = 1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True


class TransferStatus:
    """Sticky once it has failed."""

    def __init__(self):
        self.code, self.message = StatusCode.IN_PROGRESS, ""
        self.over = threading.Event()

    def end(self, code: StatusCode, message: str = "") -> None:
        if not self.over.is_set():
            self.code, self.message = code, message
            self.over.set()

    def InProgress(self):
        return self.code is StatusCode.IN_PROGRESS

    def Succeeded(self):
        return self.code is StatusCode.SUCCESS

    def Failed(self):
        return not self.InProgress() and not self.Succeeded()

    def Code(self):
        return self.code

    def Message(self):
        return self.message

    def WaitFor(self, milliseconds):
        self.over.wait(milliseconds / 1000)
        return self.code


@dataclass
class Faults:
    sq_full: int = 0
    """So many posts find the send queue full."""
    fail_after: int | None = None
    """The next read fails after so many records, and goes on writing the rest `late_s` afterwards."""
    late_s: float = 0.05
    lost: int = 0
    """So many reads land and never complete; their session is dead from then on."""
    no_session: int = 0
    refuse_registration: bool = False
    no_adapter: bool = False
    pace_s: float = 0.0
    """Pause before each record."""
    late_writes: list[threading.Thread] = field(default_factory=list)


class Session:
    def __init__(self, engine: "IOEngine", local: MemoryDesc, remote: MemoryDesc):
        # Not the engine itself: it must end with its owner's last reference.
        self.library, self.work, self.stopped = engine.library, engine.work, engine.stopped
        self.local, self.remote, self.dead = local, remote, False

    def alive(self):
        return not self.dead

    def batch_read(self, local, remote, sizes, uid):
        assert isinstance(uid, int)
        assert isinstance(local, list) and len(local) == len(remote) == len(sizes)
        status, faults = TransferStatus(), self.library.faults
        if faults.sq_full > 0:
            faults.sq_full -= 1
            status.end(StatusCode.ERR_RDMA_OP, "SQ full: no free work request")
        elif any(o < 0 or o + n > self.remote.size for o, n in zip(remote, sizes, strict=True)):
            status.end(StatusCode.ERR_INVALID_ARGS, "offset out of range")
        else:
            self.work.put((self, list(zip(local, remote, sizes, strict=True)), status))
        return status

    @property
    def stopped_or_alone(self) -> bool:
        return self.stopped.is_set() or self.remote.engine not in self.library.engines

    def write(self, records, pace_s=0.0) -> None:
        for to, at, n in records:
            if pace_s:
                time.sleep(pace_s)
            if self.stopped_or_alone:
                return
            ctypes.memmove(self.local.data + to, self.remote.data + at, n)


class IOEngine:
    library: "FakeMori"

    def __init__(self, key: str, config: IOEngineConfig):
        assert key not in self.library.engines, "an engine key is used once"
        self.library.engines[key] = self
        self.key, self.host, self.remotes, self.backend = key, config.host, set(), None
        self.work = queue.Queue()
        self.stopped = threading.Event()
        self.worker = threading.Thread(target=_complete, args=(self.library, self.work), daemon=True)
        self.worker.start()

    def create_backend(self, kind, config):
        if self.library.faults.no_adapter:
            raise RuntimeError("no active RDMA device")
        assert not config.enable_notification, "notifications take places in the send queue"
        self.backend = kind

    def get_engine_desc(self):
        return EngineDesc(self.key, self.host)

    def register_memory(self, address, size, device, kind):
        if size == 0:
            self.library.aborted = True  # the real one ends the process
        if self.library.faults.refuse_registration:
            raise RuntimeError("ibv_reg_mr failed: operation not supported")
        assert (device == -1) == (kind is MemoryLocationType.CPU)
        return MemoryDesc(self.key, address, size)

    def register_remote_engine(self, descriptor):
        if not isinstance(descriptor, EngineDesc):
            raise RuntimeError("not an engine descriptor")  # noqa: TRY004 - as the library does
        self.remotes.add(descriptor.key)

    def deregister_remote_engine(self, descriptor):
        self.remotes.discard(descriptor.key)

    def allocate_transfer_uid(self):
        return next(self.library.uids)

    def create_session(self, local, remote):
        if self.library.faults.no_session > 0:
            self.library.faults.no_session -= 1
            return None
        assert remote.engine in self.remotes, "a session with an engine that was not registered"
        return Session(self, local, remote)

    def __del__(self):
        self.stopped.set()
        self.work.put(None)
        self.worker.join()
        for late in self.library.faults.late_writes:
            late.join()
        self.library.engines.pop(self.key, None)


def _complete(library: "FakeMori", work: queue.Queue) -> None:
    while (item := work.get()) is not None:
        _run(library.faults, *item)
        del item


def _run(faults: Faults, session: Session, records, status: TransferStatus) -> None:
    if session.dead or session.stopped_or_alone:
        session.dead = True
        status.end(StatusCode.ERR_RDMA_OP, "transport retry counter exceeded")
        return
    stop_at, faults.fail_after = faults.fail_after, None
    session.write(records if stop_at is None else records[:stop_at], faults.pace_s)
    if stop_at is not None:
        session.dead = True
        rest = threading.Thread(target=_later, args=(session, records[stop_at:], faults.late_s))
        faults.late_writes.append(rest)
        rest.start()
        status.end(StatusCode.ERR_RDMA_OP, "work request flushed")
    elif faults.lost > 0:
        faults.lost -= 1
        session.dead = True
    elif session.stopped_or_alone:
        status.end(StatusCode.ERR_RDMA_OP, "transport retry counter exceeded")
    else:
        status.end(StatusCode.SUCCESS)


def _later(session: Session, records, late_s: float) -> None:
    if not session.stopped.wait(late_s):
        session.write(records)


class FakeMori:
    """The module `mori.io`."""

    StatusCode, BackendType, PollCqMode, MemoryLocationType = StatusCode, BackendType, PollCqMode, MemoryLocationType
    EngineDesc, MemoryDesc, IOEngineConfig, RdmaBackendConfig = (
        EngineDesc,
        MemoryDesc,
        IOEngineConfig,
        RdmaBackendConfig,
    )

    def __init__(self):
        self.faults = Faults()
        self.engines: dict[str, IOEngine] = weakref.WeakValueDictionary()
        self.aborted = False
        self.uids = itertools.count(1)
        self.IOEngine = type("IOEngine", (IOEngine,), {"library": self})
