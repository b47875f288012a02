"""Reading another process's memory by `process_vm_readv` (CMA): whether this host permits it, and the call itself.

Containers often forbid it (seccomp, yama, another user); then UCX drops to TCP without a word, so we try it ourselves.
"""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy bytes from an address in process `pid` to an address here; raises OSError with the reason."""
    done = 0
    while done < nbytes:
        local, remote = _Iovec(target + done, nbytes - done), _Iovec(source + done, nbytes - done)
        got = _libc.process_vm_readv(
            ctypes.c_int(pid),
            ctypes.byref(local),
            ctypes.c_ulong(1),
            ctypes.byref(remote),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += got


def denied(pid: int, address: int) -> str:
    """Return why memory of that process cannot be read, or an empty string if one byte could be."""
    byte = ctypes.create_string_buffer(1)
    try:
        read_memory(pid, address, ctypes.addressof(byte), 1)
    except OSError as error:
        return error.strerror or "it cannot be read"
    return ""
