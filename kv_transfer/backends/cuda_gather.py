"""Many small copies of device memory in one kernel: copy engines begin about one a microsecond, whatever its size.

The kernel is PTX that the driver itself compiles, so that nothing but the driver is needed. Every warp moves one stretch
of the pieces, laid end to end, by 16 bytes a lane; sources may lie in a peer's memory that is mapped here.
"""

import ctypes
import threading
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.api import I64

MAX_PIECES = 4096
ALIGN = 16
"""Addresses and sizes are multiples of it, or the pieces are not for this kernel."""
THREADS, WARP = 512, 32
LINE = WARP * ALIGN
CHUNK = 8 * LINE
"""Bytes that a warp has in flight: eight loads of each lane."""
NAME = b"tandem_gather"
_COLUMNS = 3
_LOADS = CHUNK // LINE


def _move() -> str:
    """Eight loads of a lane, then eight stores: those that lie beyond the piece are left out."""
    lines: list[str] = []
    registers = [f"{{%v{4 * i}, %v{4 * i + 1}, %v{4 * i + 2}, %v{4 * i + 3}}}" for i in range(_LOADS)]
    for i, values in enumerate(registers):
        lines += [f"add.u64 %entry, %off, {i * LINE};", f"setp.lt.u64 %q{i}, %entry, %size;"]
        lines += [f"@%q{i} ld.global.L1::no_allocate.v4.u32 {values}, [%from + {i * LINE}];"]
    lines += [f"@%q{i} st.global.v4.u32 [%to + {i * LINE}], {values};" for i, values in enumerate(registers)]
    return "\n".join(f"    {line}" for line in lines)


PTX = f"""
.version 7.4
.target sm_80
.address_size 64

// table [3, count] u64: targets, sources, and where each piece ends when all are laid end to end
.visible .entry {NAME.decode()}(.param .u64 table, .param .u32 count, .param .u64 span)
{{
    .reg .pred %p, %q<{_LOADS}>;
    .reg .b32 %thread, %block, %width, %lane, %low, %high, %mid, %last, %v<{4 * _LOADS}>;
    .reg .b64 %table, %sources, %ends, %at, %stop, %span, %end, %begin, %entry, %from, %to, %off, %size, %next;

    ld.param.u64 %table, [table];
    ld.param.u32 %last, [count];
    ld.param.u64 %span, [span];
    mul.wide.u32 %sources, %last, 8;
    add.u64 %ends, %sources, %sources;
    add.u64 %sources, %table, %sources;
    add.u64 %ends, %table, %ends;
    sub.u32 %last, %last, 1;

    // Stretch of this warp: [at, stop) of all bytes.
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    and.b32 %lane, %thread, 31;
    mad.lo.u32 %thread, %block, %width, %thread;
    shr.u32 %thread, %thread, 5;
    cvt.u64.u32 %at, %thread;
    mul.lo.u64 %at, %at, %span;
    add.u64 %stop, %at, %span;
    mul.wide.u32 %entry, %last, 8;
    add.u64 %entry, %ends, %entry;
    ld.global.u64 %end, [%entry];
    min.u64 %stop, %stop, %end;
    setp.ge.u64 %p, %at, %stop;
    @%p bra DONE;

    // The first piece that ends behind its begin.
    mov.u32 %low, 0;
    mov.u32 %high, %last;
SEARCH:
    setp.ge.u32 %p, %low, %high;
    @%p bra FOUND;
    add.u32 %mid, %low, %high;
    shr.u32 %mid, %mid, 1;
    mul.wide.u32 %entry, %mid, 8;
    add.u64 %entry, %ends, %entry;
    ld.global.u64 %end, [%entry];
    setp.gt.u64 %p, %end, %at;
    @%p mov.u32 %high, %mid;
    @%p bra SEARCH;
    add.u32 %low, %mid, 1;
    bra SEARCH;
FOUND:
    mov.u64 %begin, 0;
    setp.eq.u32 %p, %low, 0;
    @%p bra PIECE;
    mul.wide.u32 %entry, %low, 8;
    add.u64 %entry, %ends, %entry;
    ld.global.u64 %begin, [%entry + -8];
PIECE:
    mul.wide.u32 %off, %low, 8;
    add.u64 %entry, %table, %off;
    ld.global.u64 %to, [%entry];
    add.u64 %entry, %sources, %off;
    ld.global.u64 %from, [%entry];
    add.u64 %entry, %ends, %off;
    ld.global.u64 %end, [%entry];
    min.u64 %next, %end, %stop;
    sub.u64 %size, %next, %at;
    sub.u64 %off, %at, %begin;
    add.u64 %to, %to, %off;
    add.u64 %from, %from, %off;
    mul.wide.u32 %off, %lane, {ALIGN};
    add.u64 %to, %to, %off;
    add.u64 %from, %from, %off;
CHUNKS:
    setp.ge.u64 %p, %off, %size;
    @%p bra NEXT;
{_move()}
    add.u64 %to, %to, {CHUNK};
    add.u64 %from, %from, {CHUNK};
    add.u64 %off, %off, {CHUNK};
    bra CHUNKS;
NEXT:
    mov.u64 %at, %next;
    mov.u64 %begin, %end;
    add.u32 %low, %low, 1;
    setp.lt.u64 %p, %at, %stop;
    @%p bra PIECE;
DONE:
    ret;
}}
"""


def suits(targets: I64, sources: I64, nbytes: I64) -> bool:
    """True if the kernel can move these pieces [n]: few enough, and all of whole 16 bytes."""
    return 0 < len(nbytes) <= MAX_PIECES and not ((targets | sources | nbytes) & (ALIGN - 1)).any()


def span_of(total: int, blocks: int) -> int:
    """Return the bytes of each warp's stretch, a multiple of what it has in flight."""
    warps = blocks * THREADS // WARP
    return -(-total // (warps * CHUNK)) * CHUNK


class Driver(Protocol):
    """What the kernel needs of `CudaDriver`."""

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver in the current context; raises TransferFailed for an error."""
        ...

    def pinned(self, device: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `kv_transfer.device.Cuda`."""
        ...


class Gather:
    """The kernel, loaded where it is first used. Thread-safe; each thread and device has its own table."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._call = driver.call
        self._lock = threading.Lock()
        self._functions: dict[int, c_void_p] = {}
        self._tables: dict[tuple[int, int], tuple[npt.NDArray[np.uint64], int]] = {}

    def start(self, device: int, stream: c_void_p, pieces: tuple[I64, I64, I64], blocks: int) -> None:
        """Queue the copies of (targets, sources, nbytes) [n] on a stream of the current device; raises TransferFailed.

        They must have ended before the same thread starts others on that device: they share a table.
        """
        function, (table, address) = self._loaded(device), self._table(device)
        targets, sources, nbytes = pieces
        count = len(nbytes)
        rows = table[: _COLUMNS * count].reshape(_COLUMNS, count)
        rows[0], rows[1], rows[2] = targets, sources, np.cumsum(nbytes)
        self._call("cuMemcpyHtoDAsync_v2", c_uint64(address), c_void_p(rows.ctypes.data), c_size_t(rows.nbytes), stream)
        values = c_uint64(address), c_uint(count), c_uint64(span_of(int(rows[2, -1]), blocks))
        parameters = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        one, none = c_uint(1), c_uint(0)
        grid, block = (c_uint(blocks), one, one), (c_uint(THREADS), one, one)
        self._call("cuLaunchKernel", function, *grid, *block, none, stream, parameters, c_void_p())

    def _loaded(self, device: int) -> c_void_p:
        with self._lock:
            function = self._functions.get(device)
            if function is None:
                module, function = c_void_p(), c_void_p()
                self._call("cuModuleLoadData", byref(module), ctypes.c_char_p(PTX.encode()))
                self._call("cuModuleGetFunction", byref(function), module, ctypes.c_char_p(NAME))
                self._functions[device] = function
            return function

    def _table(self, device: int) -> tuple[npt.NDArray[np.uint64], int]:
        key = device, threading.get_ident()
        with self._lock:
            found = self._tables.get(key)
            if found is None:
                nbytes, there = _COLUMNS * MAX_PIECES * 8, c_uint64()
                rows = self._driver.pinned(device, nbytes).view(np.uint64)
                self._call("cuMemAlloc_v2", byref(there), c_size_t(nbytes))
                found = self._tables[key] = rows, there.value
            return found
