"""The few calls of the CUDA driver that moving KV between processes needs, by ctypes: nothing to install beyond the driver.

Addresses are numbers. Primary contexts are shared with whatever else in this process uses the device (torch does).
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Iterable
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, TransferFailed
from kv_transfer.api import I64
from kv_transfer.backends.cuda_gather import Gather, suits
from kv_transfer.device import HANDLE_BYTES

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_SOURCE_IN_STREAM_ORDER = 1
_FOR_EVERY_CONTEXT = 1
_FEWEST_IN_BATCH = 4
_LARGE = 2 << 20
"""Pieces of this mean size move as fast by a copy engine (8 MiB between H200s: 265 and 267 GB/s), without multiprocessors."""
logger = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """Of a batch of copies: when the sources may be read; where the memories are is found by their addresses."""

    _fields_ = (
        ("order", c_int),
        ("source_kind", c_int),
        ("source_id", c_int),
        ("target_kind", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


class CudaDriver:
    """`kv_transfer.device.Cuda` over `libcuda`; raises ConfigError where there is none, or no device."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self.call("cuInit", c_uint(0))
        except (OSError, TransferFailed) as error:
            raise ConfigError(f"there is no usable CUDA driver here: {error}") from error
        # CUDA 13 and newer; of older ones the call has another form.
        self._batch = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        self._gather: Gather | None = Gather(self)
        self._lock = threading.Lock()
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[tuple[int, int], c_void_p] = {}
        self._mapped: dict[tuple[int, bytes], list[int]] = {}

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver; raises TransferFailed with its name for an error."""
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            raise TransferFailed(f"{name} failed: {(text.value or b'unknown').decode()}")

    @property
    def num_devices(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def use(self, device: int) -> None:
        """Make the device current for the calling thread."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context, handle = c_void_p(), c_int()
                self.call("cuDeviceGet", byref(handle), c_int(device))
                self.call("cuDevicePrimaryCtxRetain", byref(context), handle)
                self._contexts[device] = context
        self.call("cuCtxSetCurrent", context)

    def uuid(self, device: int) -> bytes:
        handle, name = c_int(), ctypes.create_string_buffer(16)
        self.call("cuDeviceGet", byref(handle), c_int(device))
        self.call("cuDeviceGetUuid", name, handle)
        return name.raw

    def find(self, uuid: bytes) -> int | None:
        return next((device for device in range(self.num_devices) if self.uuid(device) == uuid), None)

    def allocate(self, device: int, nbytes: int) -> int:
        self.use(device)
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        try:
            self.call("cuMemsetD8_v2", address, c_ubyte(0), c_size_t(nbytes))
            self.call("cuCtxSynchronize")
        except TransferFailed:
            self.free(device, address.value)
            raise
        return address.value

    def free(self, device: int, address: int) -> None:
        self.use(device)
        self.call("cuMemFree_v2", c_uint64(address))

    def memory(self, device: int) -> tuple[int, int]:
        self.use(device)
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def name(self, device: int) -> str:
        handle, text = c_int(), ctypes.create_string_buffer(256)
        self.call("cuDeviceGet", byref(handle), c_int(device))
        self.call("cuDeviceGetName", text, c_int(len(text)), handle)
        return text.value.decode(errors="replace")

    def total_bytes(self, device: int) -> int:
        handle, size = c_int(), c_size_t()
        self.call("cuDeviceGet", byref(handle), c_int(device))
        self.call("cuDeviceTotalMem_v2", byref(size), handle)
        return size.value

    def reaches(self, device: int, peer: int) -> bool:
        """True if a device can read the memory of another one directly."""
        able, ours, theirs = c_int(), c_int(), c_int()
        self.call("cuDeviceGet", byref(ours), c_int(device))
        self.call("cuDeviceGet", byref(theirs), c_int(peer))
        self.call("cuDeviceCanAccessPeer", byref(able), ours, theirs)
        return bool(able.value)

    def share(self, device: int, address: int) -> tuple[bytes, int]:
        self.use(device)
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        self.call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle), address - base.value

    def map(self, device: int, handle: bytes) -> int:
        self.use(device)
        with self._lock:
            known = self._mapped.get((device, handle))
            if known is None:
                base = c_uint64()
                shared = _Handle.from_buffer_copy(handle)
                self.call("cuIpcOpenMemHandle_v2", byref(base), shared, c_uint(_LAZY_PEER_ACCESS))
                known = self._mapped[device, handle] = [base.value, 0]
            known[1] += 1
            return known[0]

    def unmap(self, device: int, handle: bytes) -> None:
        self.use(device)
        with self._lock:
            known = self._mapped[device, handle]
            known[1] -= 1
            if not known[1]:
                del self._mapped[device, handle]
                self.call("cuIpcCloseMemHandle", c_uint64(known[0]))

    def pinned(self, device: int, nbytes: int) -> npt.NDArray[np.uint8]:
        self.use(device)
        address = c_void_p()
        try:
            self.call("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(_FOR_EVERY_CONTEXT))
        except TransferFailed as error:
            logger.warning("copies through host memory are slower: %s", error.message)
            return np.empty(nbytes, np.uint8)
        assert address.value is not None
        memory = (c_ubyte * nbytes).from_address(address.value)
        weakref.finalize(memory, self._unpin, device, address.value).atexit = False
        return np.ctypeslib.as_array(memory)

    def _unpin(self, device: int, address: int) -> None:
        try:
            self.use(device)
            self.call("cuMemFreeHost", c_void_p(address))
        except TransferFailed as error:
            logger.warning("page-locked memory was not given back: %s", error.message)

    def copy_apart(self, device: int, targets: I64, sources: I64, nbytes: I64, blocks: int = 0) -> None:
        batch, few = self._batch, len(nbytes) < _FEWEST_IN_BATCH
        by_kernel = blocks and not few and int(nbytes.sum()) < _LARGE * len(nbytes) and suits(targets, sources, nbytes)
        if by_kernel and self._gathered(device, (targets, sources, nbytes), blocks):
            return
        if batch is None or few:
            self.copy(device, zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))
            return
        self.use(device)
        stream = self._stream(device)
        columns = [np.ascontiguousarray(column, np.uint64) for column in (targets, sources, nbytes)]
        places = [c_void_p(column.ctypes.data) for column in columns]
        attributes, first = _CopyAttributes(order=_SOURCE_IN_STREAM_ORDER), c_size_t(0)
        code = int(batch(*places, c_size_t(len(nbytes)), byref(attributes), byref(first), c_size_t(1), stream))
        self.call("cuStreamSynchronize", stream)
        if code:
            self._batch = None
            logger.warning("cuMemcpyBatchAsync failed with code %d: pages are copied one by one from now on", code)
            self.copy_apart(device, targets, sources, nbytes)

    def _gathered(self, device: int, pieces: tuple[I64, I64, I64], blocks: int) -> bool:
        """Copy with the kernel; False, for good, if it cannot be started."""
        gather = self._gather
        if gather is None:
            return False
        self.use(device)
        stream = self._stream(device)
        try:
            gather.start(device, stream, pieces, blocks)
        except TransferFailed as error:
            self._gather = None
            logger.warning("pages are copied by the copy engines: %s", error.message)
            self.call("cuStreamSynchronize", stream)
            return False
        self.call("cuStreamSynchronize", stream)
        return True

    def copy(self, device: int, copies: Iterable[tuple[int, int, int]]) -> None:
        self.use(device)
        stream = self._stream(device)
        start = self._library.cuMemcpyAsync
        failed = 0
        for target, source, nbytes in copies:
            failed = start(c_uint64(target), c_uint64(source), c_size_t(nbytes), stream)
            if failed:
                break
        # What was started before a failure must be over as well, or the context itself has ended.
        self.call("cuStreamSynchronize", stream)
        if failed:
            raise TransferFailed(f"cuMemcpyAsync failed with code {failed}")

    def _stream(self, device: int) -> c_void_p:
        """One stream for each thread and device: threads do not wait for each other's copies."""
        key = (device, threading.get_ident())
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                stream = c_void_p()
                self.call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
                self._streams[key] = stream
            return stream
