"""Memory for KV pools: shared segments that peers on the same host may map read-only, or anonymous memory.

A segment is a file in a tmpfs, mode 0600, named by incarnation, process id and process start time, locked for as long
as its owner lives. It is allocated in full at once, so that a full tmpfs fails here and not later by SIGBUS. Knows no
layout and no transport. The owner creates memory first and closes it last.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.ids import Incarnation
from kv_transfer.api import HOST, MemoryRegion

U8 = npt.NDArray[np.uint8]
SEGMENT_PREFIX = "tandem-kv-"
_ALIGN = mmap.PAGESIZE
logger = logging.getLogger(__name__)


def region_view(region: MemoryRegion) -> U8:
    """Return the region's bytes as a uint8 array; valid while the region's memory is mapped. Host memory only."""
    assert region.device == HOST, "no CPU instruction may touch memory of a device"
    array = np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address))
    array.flags.writeable = region.writable
    return array


def is_on_device(regions: Iterable[MemoryRegion]) -> bool:
    """True if any of the regions lies in device memory."""
    return any(region.device != HOST for region in regions)


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    name: str
    path: Path | None
    fd: int


class RegionMemory:
    """Page-aligned regions in one mapping. `buffers` are writable views (for `torch.frombuffer`) in order of `regions`."""

    def __init__(self, mapping: _Mapping, sizes: Sequence[int]) -> None:
        self._mapping = mapping
        base = np.frombuffer(mapping.memory, np.uint8)
        address = int(base.ctypes.data)
        del base
        whole = memoryview(mapping.memory)
        regions: list[MemoryRegion] = []
        buffers: list[memoryview] = []
        for index, (offset, size) in enumerate(zip(_offsets(sizes), sizes, strict=True)):
            regions.append(
                MemoryRegion(
                    id=index,
                    address=address + offset,
                    nbytes=size,
                    writable=True,
                    shared_name=mapping.name,
                    shared_offset=offset if mapping.name else 0,
                )
            )
            buffers.append(whole[offset : offset + size])
        self.regions = tuple(regions)
        self.buffers: tuple[memoryview, ...] = tuple(buffers)
        self._closed = False

    def forget_name(self) -> None:
        """Whoever should map the segment has done so: without a name it goes with the last process that maps it."""
        if self._mapping.path is not None:
            self._mapping.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the segment's name and unmap; memory that tensors still use goes with the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.forget_name()
        if self._mapping.path is not None:
            os.close(self._mapping.fd)
        try:
            for buffer in self.buffers:
                buffer.release()
            self.buffers = ()
            self._mapping.memory.close()
        except BufferError:
            logger.debug("KV memory is still in use by tensors; it is unmapped when they go")


def allocate(
    sizes: Sequence[int],
    *,
    incarnation: Incarnation,
    directory: str = "",
    what: str = "KV pool",
    setting: str = "engine.num_pages",
) -> RegionMemory:
    """Allocate one region per size, shared in `directory` if one is given, else anonymous; all bytes are zero.

    Raises ConfigError, with the sizes and the `setting` to lower, if there is no room.
    """
    if not sizes or min(sizes) <= 0:
        raise ConfigError(f"the {what} needs regions of at least one byte each")
    total = _offsets([*sizes, 1])[-1]
    if directory:
        return RegionMemory(_create(Path(directory), incarnation, total, what, setting), sizes)
    try:
        memory = mmap.mmap(-1, total)
    except OSError as error:
        raise ConfigError(
            f"the {what} needs {total / 2**20:.1f} MiB of memory, more than this host gives ({error.strerror}); "
            f"lower {setting}"
        ) from error
    return RegionMemory(_Mapping(memory, "", None, -1), sizes)


def map_segment(directory: str, name: str, *, writable: bool = False) -> mmap.mmap:
    """Map a segment of another process, by default so that writing through it is impossible.

    Raises OSError; the name must be a plain segment name.
    """
    if not name.startswith(SEGMENT_PREFIX) or "/" in name:
        raise OSError(errno.EINVAL, "not the name of a KV segment")
    fd = os.open(Path(directory) / name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)


def sweep_stale_segments(directory: str) -> list[str]:
    """Remove segments whose owner is dead and return their names; safe to call at any time from any process."""
    swept: list[str] = []
    for path in sorted(Path(directory).glob(f"{SEGMENT_PREFIX}*")):
        if _owner_lives(path.name) or _is_locked(path):
            continue
        path.unlink(missing_ok=True)
        swept.append(path.name)
    if swept:
        logger.info("removed %d shared KV segments of dead processes", len(swept))
    return swept


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return offsets


def _create(directory: Path, incarnation: Incarnation, total: int, what: str, setting: str) -> _Mapping:
    path = directory / f"{SEGMENT_PREFIX}{incarnation}-{os.getpid()}-{_start_time(os.getpid())}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot create a shared KV segment in {directory}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, total)
        memory = mmap.mmap(fd, total)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        raise ConfigError(
            f"the {what} needs {total / 2**20:.1f} MiB of shared memory, but {directory} has {free / 2**20:.1f} MiB "
            f"free ({error.strerror}); make it larger or lower {setting}"
        ) from error
    return _Mapping(memory, path.name, path, fd)


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which a process began: tells it from a later one of the same id. Empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _owner_lives(name: str) -> bool:
    _, _, stamp = name.removeprefix(SEGMENT_PREFIX).partition("-")
    pid, _, started = stamp.partition("-")
    return pid.isdigit() and started != "" and _start_time(int(pid)) == started


def _is_locked(path: Path) -> bool:
    """True if some process, maybe in another container, holds the segment's lock or it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
