"""DeepSeek-V4.1's pages between two processes on GPUs: over each transport, and the device's own copy as the limit.

    python -m benchmarks.transfer_gpu [--pages 1024] [--repeats 7] [--transports cuda-ipc@0 cuda-ipc nixl] [--out DIRECTORY]

A child process serves; this one reads random pages to random places and compares every byte. `cuda-ipc@N` sets
`transfer.gather_blocks` (0: copy engines, in batches; `cuda-ipc@each`: one call a page); the pages that shm serves lie in host memory, as they must. What could not
run is named in the record with the reason. Sizes are bytes, times seconds; a copy of n bytes counts n, not read plus written.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec
import numpy as np

from benchmarks.record import write_record
from core.clock import SystemClock
from core.errors import TandemError
from core.ids import LeaseId, TransferId, fresh_incarnation
from kv_transfer.api import I64, MemoryRegion, PeerInfo, Records, Transport
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.config import TransferConfig
from kv_transfer.device import Cuda
from kv_transfer.factory import TransportFactory
from kv_transfer.memory import U8, RegionMemory, allocate
from kv_transfer.plan import split
from kv_transfer.settings import TransportSettings

PAGE_BYTES = 227_840
"""One page of 256 tokens: four layers' entries and index keys, packed, 890 bytes a token."""
ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0
OP_BYTES = (32 << 20, 128 << 20)
"""Sizes of reads posted together, as a pull posts them (`transfer.max_bytes_per_op`)."""
READY = "ready "
"""Before the description of the source, in hex, on its standard output."""


class Memory(Protocol):
    """Memory of a device, as the benchmark fills and checks it."""

    cuda: Cuda

    def allocate(self, nbytes: int, device: int = 0) -> MemoryRegion:
        """Return a plain allocation on a device."""
        ...


class GpuMemory:
    """The real device."""

    def __init__(self, directory: str) -> None:
        del directory
        self.cuda = CudaDriver()

    def allocate(self, nbytes: int, device: int = 0) -> MemoryRegion:
        address = self.cuda.allocate(device, nbytes)
        return MemoryRegion(id=0, address=address, nbytes=nbytes, writable=True, device=device)


class OneByOne:
    """A device whose pages are copied by one call each: what the others are compared with."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def copy_apart(self, device: int, targets: I64, sources: I64, nbytes: I64, blocks: int = 0) -> None:
        """Copy in order, one by one."""
        del blocks
        self._cuda.copy(device, zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))


class Open:
    """Every read is allowed."""

    def readable(self, lease: LeaseId, region: int, offsets: I64, nbytes: I64) -> bool:
        del lease, region, offsets, nbytes
        return True


def pattern(pages: int, page_bytes: int) -> U8:
    """What the source holds: no two pages alike."""
    return np.random.default_rng(41).integers(0, 256, pages * page_bytes, dtype=np.uint8)


def open_transport(
    name: str, memory: Memory, region: MemoryRegion, directory: str, on_event: Callable[[], None], *, serves: bool
) -> Transport:
    """Open a transport, copying as its name says, over one region."""
    name, _, how = name.partition("@")
    config, cuda = TransferConfig(segment_directory=directory, landing="direct"), memory.cuda
    if how == "each":
        cuda = OneByOne(cuda)
    elif how:
        config = msgspec.structs.replace(config, gather_blocks=int(how))
    settings = TransportSettings(fresh_incarnation(), config, cuda=cast(Cuda, cuda))
    return TransportFactory(settings, [region], SystemClock()).open(name, Open() if serves else None, on_event)


def serve(name: str, memory: Memory, pages: int, page_bytes: int, directory: str) -> None:
    """Fill a region, print its description, serve until standard input ends."""
    data, host = pattern(pages, page_bytes), list[RegionMemory]()
    if name == "shm":
        host.append(allocate([pages * page_bytes], incarnation=fresh_incarnation(), directory=directory))
        region = host[0].regions[0]
        host[0].buffers[0][:] = data.data
    else:
        region = memory.allocate(pages * page_bytes)
        memory.cuda.copy(0, [(region.address, int(data.ctypes.data), region.nbytes)])
    transport = open_transport(name, memory, region, directory, lambda: None, serves=True)
    print(READY + msgspec.msgpack.encode(transport.export()).hex(), flush=True)
    sys.stdin.read()
    transport.destroy()
    for each in host:
        each.close()


@contextmanager
def source(arguments: Sequence[str]) -> Generator[PeerInfo]:
    """Run a serving child; raises RuntimeError with its last words if it could not start."""
    command = [sys.executable, "-m", "benchmarks.transfer_gpu", "--serve", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        last = LastLines(child.stderr)
        # Native libraries may print, too.
        line = next((line for line in child.stdout if line.startswith(READY)), "")
        if not line:
            child.wait()
            raise RuntimeError(f"the source ended: {last.text()}")
        try:
            yield msgspec.msgpack.decode(bytes.fromhex(line.removeprefix(READY)), type=PeerInfo)
        finally:
            child.stdin.close()
            child.wait()
            last.text()


class LastLines:
    """Drains a pipe and keeps its last line."""

    def __init__(self, pipe: IO[str] | None) -> None:
        self._last = ""
        self._thread = threading.Thread(target=self._drain, args=(pipe,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the last line, once the pipe has ended."""
        self._thread.join(5)
        return self._last

    def _drain(self, pipe: IO[str] | None) -> None:
        for line in pipe or ():
            if line.strip():
                self._last = line.strip()


def timed(repeats: int, run: Callable[[], None], nbytes: int) -> dict[str, object]:
    """Run once to warm up, then time; the median counts."""
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {"median_s": median, "gb_per_s": nbytes / median / 1e9, "seconds": seconds}


def measure(options: argparse.Namespace, name: str, memory: Memory, directory: str) -> dict[str, object]:
    """Read all pages over one transport, permuted on both sides, and compare every byte."""
    pages, size = options.pages, options.page_bytes
    region, news = memory.allocate(pages * size, options.target_device), threading.Event()
    transport = open_transport(name, memory, region, directory, news.set, serves=False)
    rng = np.random.default_rng(7)
    order, places = rng.permutation(pages), rng.permutation(pages)
    try:
        with source(
            [name, f"--memory={options.memory}", f"--pages={pages}", f"--page-bytes={size}", directory]
        ) as info:
            peer = transport.connect(info, 20.0)

            def read(indices: I64, targets: I64, op_bytes: int = 0) -> None:
                columns = (indices * size, targets * size, np.full(len(indices), size, np.int64))
                deadline = SystemClock().now() + DEADLINE_S
                whole = Records(0, 0, *columns)
                parts = split(whole, transport.capabilities.max_records_per_op, op_bytes) if op_bytes else [whole]
                ops = [transport.submit(peer, part, TransferId("t"), LeaseId(1), deadline) for part in parts]
                for op in ops:
                    while not transport.quiesced(op):
                        news.wait(1.0)
                        news.clear()
                    if op.error is not None:
                        raise op.error

            one = timed(50, lambda: read(order[:1], places[:1]), size)
            whole = timed(options.repeats, lambda: read(order, places), pages * size)
            in_ops = {
                f"in_reads_of_{nbytes >> 20}_mib": timed(
                    options.repeats, lambda nbytes=nbytes: read(order, places, nbytes), pages * size
                )
                for nbytes in OP_BYTES
            }
            landed = np.zeros(pages * size, np.uint8)
            memory.cuda.copy(options.target_device, [(int(landed.ctypes.data), region.address, region.nbytes)])
            expected = pattern(pages, size).reshape(pages, size)
            same = bool(np.array_equal(landed.reshape(pages, size)[places], expected[order]))
    finally:
        transport.destroy()
    version = transport.capabilities.version
    return {"bytes_equal": same, "one_page": one, "all_pages": whole, **in_ops, "version": version}


def limit(options: argparse.Namespace, memory: Memory) -> dict[str, object]:
    """The same bytes within one process: in one piece, and page by page in the same order.

    Between two devices: as torch copies from one to the other, in one piece.
    """
    pages, size = options.pages, options.page_bytes
    if options.target_device:
        return between_devices(options)
    first, second = (memory.allocate(pages * size) for _ in range(2))
    rng = np.random.default_rng(7)
    order, places = rng.permutation(pages).tolist(), rng.permutation(pages).tolist()
    whole = [(second.address, first.address, pages * size)]
    each = [(second.address + t * size, first.address + s * size, size) for s, t in zip(order, places, strict=True)]
    return {
        "one_piece": timed(options.repeats, lambda: memory.cuda.copy(0, whole), pages * size),
        "page_by_page": timed(options.repeats, lambda: memory.cuda.copy(0, each), pages * size),
    }


def between_devices(options: argparse.Namespace) -> dict[str, object]:
    """A plain peer-to-peer copy from device 0."""
    torch = importlib.import_module("torch")
    nbytes = options.pages * options.page_bytes
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{options.target_device}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(target.device)

    reaches = torch.cuda.can_device_access_peer(options.target_device, 0)
    return {"peer_access": reaches, "one_piece": timed(options.repeats, copy, nbytes)}


def load_memory(path: str, directory: str) -> Memory:
    """Return the memory class named `module:Class`, opened."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a child, or measure; 1 unless everything asked for ran and was byte-exact."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--transports", nargs="+", default=["cuda-ipc", "nixl"])
    parser.add_argument("--memory", default="benchmarks.transfer_gpu:GpuMemory")
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--page-bytes", type=int, default=PAGE_BYTES)
    parser.add_argument("--target-device", type=int, default=0, help="the source is on device 0")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write transfer_gpu.json there")
    parser.add_argument("--commit", default="", help="what to record where there is no repository")
    parser.add_argument("--note", default="", help="to record, such as the device and its driver")
    options = parser.parse_args(arguments)
    if options.serve:
        memory = load_memory(options.memory, options.directory)
        serve(options.serve, memory, options.pages, options.page_bytes, options.directory)
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        memory = load_memory(options.memory, directory)
        result: dict[str, object] = {"pages": options.pages, "page_bytes": options.page_bytes}
        result["limit: copies of the device within one process"] = limit(options, memory)
        good = True
        for name in options.transports:
            try:
                result[name] = found = measure(options, name, memory, directory)
                good &= bool(found["bytes_equal"])
            except (TandemError, RuntimeError, OSError) as error:
                result[name], good = {"did not run": str(error)}, False
    print(json.dumps(result, indent=1))
    if options.out:
        write_record("transfer_gpu", result, note=options.note, directory=options.out, commit_run=options.commit)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
