"""C4: speed, CPU and latency of every KV transport against a memcpy and a bare socket over the same records.

    python -m benchmarks.transfer_backends [--transports shm,tcp,nixl:landing=staged] [--repeat 5] [--record NAME]

Requests of scattered records, so many in flight, read from another process by the shipped `Transport`. In each cell all
contestants run one after the other, forwards and backwards in turn; figures are medians over the rounds. ``socket`` has
as many requests in flight as the transports, ``stream`` all of them. All contestants write the same memory and read the
same, both touched before; what they ask for is laid out before the clock starts. Also: what a request costs whatever its
size, and which sizes the engine's have (`transfer_sizes`); how long the thread that calls a transport is blocked in it
(`transfer_blocking`).
"""

import argparse
import contextlib
import itertools
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.record import write_record
from benchmarks.transfer_alone import ALONE, MooncakeAlone, NixlAlone
from benchmarks.transfer_blocking import blocking
from benchmarks.transfer_peers import FOREVER, CopyPeer, SocketPeer, Told, source_process
from benchmarks.transfer_sizes import engine_requests, fixed_cost
from core.clock import SystemClock
from core.errors import NoCapacity
from core.ids import LeaseId, TransferId, fresh_incarnation
from kv_transfer.api import MemoryRegion, Op, OpState, Peer, Records, Transport
from kv_transfer.config import TransferConfig
from kv_transfer.factory import TransportFactory
from kv_transfer.memory import U8, allocate, map_segment, region_view
from kv_transfer.settings import TransportSettings

POOL = 128 << 20
REQUESTS = (2 << 20, 16 << 20)
RECORDS = (4096, 16384, 65536, 262144, 1 << 20)
IN_FLIGHT = (1, 8, 64)
FITTED = tuple(1 << power for power in range(19, 25))
"""Requests by whose times the fixed cost is found, of records of this size:"""
FITTED_RECORD = 64 << 10
DEFAULT = "shm,tcp,nixl,mooncake"
_BUSY_S = 0.25
"""How long a contestant runs in one round, at least one pass over the pool."""

Request = tuple[list[int], list[int], int]


@dataclass
class Figures:
    """Of one contestant in one cell, one entry a round."""

    gigabytes_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gib: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float | int | None]:
        waits = sorted(self.latencies_s)
        return {
            "gb_per_s": round(statistics.median(self.gigabytes_per_s), 3),
            "gb_per_s_range": [round(min(self.gigabytes_per_s), 3), round(max(self.gigabytes_per_s), 3)],
            "cpu_s_per_gib": round(statistics.median(self.cpu_s_per_gib), 3),
            "latency_p50_us": round(1e6 * waits[len(waits) // 2]) if waits else None,
            "latency_p99_us": round(1e6 * waits[int(len(waits) * 0.99)]) if len(waits) >= 1000 else None,
            "latency_max_us": round(1e6 * waits[-1]) if waits else None,
            "requests": len(waits),
        }


class Reader:
    """Requests over one shipped transport, so many in flight."""

    def __init__(self, name: str, told: Told, factory: TransportFactory) -> None:
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.transport: Transport = factory.open(name, None, partial(self._news.put, None))
        self._peer: Peer = self.transport.connect(dict(told.infos)[name], 10.0)
        self._lease: LeaseId = told.lease
        self._limit = self.transport.capabilities.max_records_per_op

    def run(self, requests: Sequence[Records], in_flight: int) -> list[float]:
        """Read all; returns the seconds of each."""
        waits: list[float] = []
        open_ops: dict[int, tuple[Op, float]] = {}
        assert all(len(each.nbytes) <= self._limit for each in requests)
        records = list(reversed(requests))
        while records or open_ops:
            while records and len(open_ops) < in_flight:
                start = time.perf_counter()
                try:
                    op = self.submit(records[-1])
                except NoCapacity:
                    break
                records.pop()
                open_ops[op.id] = (op, start)
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=5.0)
            for op in self.transport.poll():
                assert op.state is OpState.DONE, op.error
                waits.append(time.perf_counter() - open_ops.pop(op.id)[1])
        return waits

    def submit(self, records: Records) -> Op:
        """Post one read; raises NoCapacity."""
        return self.transport.submit(self._peer, records, TransferId("b"), self._lease, FOREVER)


def records_of(requests: Sequence[Request]) -> list[Records]:
    """As the planner hands them to a transport: int64 arrays."""
    return [
        Records(0, 0, np.array(theirs, np.int64), np.array(ours, np.int64), np.full(len(ours), n, np.int64))
        for theirs, ours, n in requests
    ]


def requests_of(record: int, request: int) -> list[Request]:
    """The whole pool in a random order of records on both sides, cut into requests of so many bytes."""
    rng = np.random.default_rng(record)
    count, each = POOL // record, max(1, request // record)
    theirs, ours = rng.permutation(count) * record, rng.permutation(count) * record
    cuts = range(0, count, each)
    return [(theirs[at : at + each].tolist(), ours[at : at + each].tolist(), record) for at in cuts]


def cpu_seconds(*pids: int) -> float:
    """User and system time of these processes and of their children that live."""
    total = 0.0
    for pid in pids:
        whole = [psutil.Process(pid), *psutil.Process(pid).children()]
        for process in whole:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def measure(figures: Figures, pids: Sequence[int], once: Callable[[], list[float]]) -> None:
    """Run passes for a while and add one entry."""
    moved, cpu, start = 0, cpu_seconds(*pids), time.perf_counter()
    while time.perf_counter() - start < _BUSY_S or not moved:
        figures.latencies_s += once()
        moved += POOL
    seconds = time.perf_counter() - start
    figures.gigabytes_per_s.append(moved / seconds / 1e9)
    figures.cpu_s_per_gib.append((cpu_seconds(*pids) - cpu) / (moved / 2**30))


def latencies(readers: dict[str, Reader], count: int = 2000) -> dict[str, object]:
    """Of requests of one record, one at a time: from submit to the poll that tells of the end."""
    rows: dict[str, object] = {}
    for name, reader in readers.items():
        for record in (4096, 65536):
            figures = Figures([0.0], [0.0])
            figures.latencies_s = reader.run(records_of([([0], [record], record)]) * count, 1)
            row = figures.row()
            rows[f"{name} {record}"] = {key: row[key] for key in row if key.startswith(("latency", "requests"))}
    return rows


Contestants = dict[str, Callable[[], list[float]]]


def open_readers(
    names: Sequence[str], told: Told, directory: str, regions: Sequence[MemoryRegion]
) -> tuple[dict[str, Reader], dict[str, str]]:
    """Return readers by variant, and why the others did not open."""
    failed = dict(told.failed)
    readers: dict[str, Reader] = {}
    for variant in (name for name in names if name_of(name) in dict(told.infos)):
        name, _, settings = variant.partition(":")
        config = TransferConfig(
            segment_directory=directory, **dict(pair.split("=") for pair in settings.split("+") if pair)
        )
        factory = TransportFactory(TransportSettings(fresh_incarnation(), config), regions, SystemClock())
        try:
            readers[variant] = Reader(name, told, factory)
        except Exception as error:  # noqa: BLE001 - a record says what did not run, and why
            failed[variant] = str(error)
    return readers, failed


def measure_cell(
    contestants: Contestants, repeat: int, pids: Sequence[int], check: Callable[[], None]
) -> dict[str, Figures]:
    """Let all run in turn, forwards and backwards."""
    figures = {name: Figures() for name in contestants}
    for turn in range(repeat):
        for name in list(contestants)[:: 1 if turn % 2 == 0 else -1]:
            measure(figures[name], pids, contestants[name])
            check()
    return figures


@dataclass
class Arena:
    """The memory of a campaign, the process that holds the source, and all who read from it."""

    pids: tuple[int, int]
    source: U8
    target: U8
    copy: CopyPeer
    wire: SocketPeer
    alone: dict[str, NixlAlone | MooncakeAlone]
    readers: dict[str, Reader]
    repeat: int

    def cell(self, record: int, request: int, depth: int) -> dict[str, Figures]:
        """Let all read the whole pool in requests of so many bytes, so many in flight."""
        requests = requests_of(record, request)
        laid_out = records_of(requests)
        contestants: Contestants = {
            "memcpy": partial(_untimed, self.copy.run, requests),
            "memmove": partial(_untimed, self.copy.run_memmove, requests),
            "socket": partial(_untimed, partial(self.wire.run, in_flight=depth), requests),
            "stream": partial(_untimed, partial(self.wire.run, in_flight=len(requests)), requests),
            **{f"{name} alone": partial(_untimed, each.run, requests) for name, each in self.alone.items()},
            **{name: partial(reader.run, laid_out, depth) for name, reader in self.readers.items()},
        }
        check = partial(_check, self.source, POOL, self.target, requests)
        return measure_cell(contestants, self.repeat, self.pids, check)

    def fixed_costs(self, depth: int) -> dict[str, dict[str, float]]:
        """Return what a request costs each contestant whatever its size."""
        by_size = {request: self.cell(FITTED_RECORD, request, depth) for request in FITTED}
        names = next(iter(by_size.values()))
        speeds = {
            name: {size: statistics.median(cell[name].gigabytes_per_s) for size, cell in by_size.items()}
            for name in names
        }
        return {name: fixed_cost({n: 1e-9 * n / speed for n, speed in of.items()}) for name, of in speeds.items()}


@contextlib.contextmanager
def open_arena(names: Sequence[str], repeat: int) -> Iterator[tuple[Arena, dict[str, str]]]:
    """Start the source and open every reader; yields why some did not open as well."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        source_process(directory, POOL, list(dict.fromkeys(map(name_of, names)))) as (pid, told),
    ):
        memory = allocate([POOL], incarnation=fresh_incarnation())
        segment = next(path.name for path in Path(directory).iterdir() if path.stat().st_size >= POOL)
        source = np.frombuffer(map_segment(directory, segment), np.uint8)[:POOL]
        readers, failed = open_readers(names, told, directory, memory.regions)
        region = memory.regions[0]
        target = region_view(region)
        copy, wire = CopyPeer(source, region), SocketPeer(told.port, memory.buffers[0])
        alone = {served.name: ALONE[served.name](served, region.address, region.nbytes) for served in told.alone}
        # The first touch of each page is the kernel's time, not a contestant's.
        target[:] = 0
        source.max()
        for each in readers.values():
            each.run(records_of(requests_of(1 << 20, 2 << 20)), 8)
        yield Arena((psutil.Process().pid, pid), source, target, copy, wire, alone, readers, repeat), failed
        for reader in readers.values():
            reader.transport.destroy()
        wire.close()


def campaign(arena: Arena, options: argparse.Namespace) -> dict[str, object]:
    """All that was asked for."""
    result: dict[str, object] = {"cells": [], "fixed_cost": {}}
    cells = []
    for request, record, depth in itertools.product(options.requests, options.records, options.in_flight):
        if depth * request > POOL and depth > 1:
            continue  # so many are not there
        cells.append(_cell(record, request, depth, arena.cell(record, request, depth)))
        print(cells[-1], flush=True)
    result["cells"] = cells
    if not options.no_fit:
        result["fixed_cost"] = {f"{depth} in flight": arena.fixed_costs(depth) for depth in (1, 8)}
        result["engine_requests"] = engine_requests()
    if not options.no_blocking:
        reads_of = {request: partial(_reads, request) for request in options.requests}
        result["blocking"] = {
            f"requests of {request} bytes": blocking(arena.readers, of, arena.target, arena.source)
            for request, of in reads_of.items()
        }
        result["one_record"] = latencies(arena.readers)
    print({key: value for key, value in result.items() if key != "cells"})
    return result


def _reads(request: int, record: int) -> list[Records]:
    return records_of(requests_of(record, request))


def name_of(variant: str) -> str:
    """The transport of ``nixl:landing=staged``."""
    return variant.partition(":")[0]


def _untimed(run: Callable[[Sequence[Request]], None], requests: Sequence[Request]) -> list[float]:
    run(requests)
    return []


def _check(source: np.ndarray, nbytes: int, target: np.ndarray, requests: Sequence[Request]) -> None:
    """Every tenth request brought the right bytes; then they are erased."""
    for theirs, ours, n in requests[::10]:
        for s, t in zip(theirs, ours, strict=True):
            assert np.array_equal(source[s : s + n], target[t : t + n]), "wrong bytes arrived"
    target[:nbytes] = 0


def _cell(record: int, request: int, depth: int, figures: dict[str, Figures]) -> dict[str, object]:
    rows = {name: figure.row() for name, figure in figures.items()}
    speed = {name: statistics.median(figure.gigabytes_per_s) for name, figure in figures.items()}
    limit = max(speed["memcpy"], speed["memmove"])
    # What others on the machine take distorts seconds, and CPU seconds much less.
    cpu = {name: statistics.median(figure.cpu_s_per_gib) for name, figure in figures.items()}
    return {
        "record_bytes": record,
        "request_bytes": request,
        "in_flight": depth,
        "of_memcpy": {name: round(value / limit, 3) for name, value in speed.items()},
        "of_memcpy_by_cpu": {name: round(min(cpu["memcpy"], cpu["memmove"]) / value, 3) for name, value in cpu.items()},
        "of_socket_by_cpu": {name: round(cpu["socket"] / value, 3) for name, value in cpu.items()},
        "of_itself_alone": {
            name: round(value / speed[f"{name_of(name)} alone"], 3)
            for name, value in speed.items()
            if f"{name_of(name)} alone" in speed
        },
        "of_itself_alone_by_cpu": {
            name: round(cpu[f"{name_of(name)} alone"] / value, 3)
            for name, value in cpu.items()
            if f"{name_of(name)} alone" in cpu
        },
        "of_socket": {name: round(value / speed["socket"], 3) for name, value in speed.items()},
        "of_stream": {name: round(value / speed["stream"], 3) for name, value in speed.items()},
        "rows": rows,
    }


def _numbers(text: str) -> list[int]:
    return [int(value) for value in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transports", default=DEFAULT)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=_numbers, default=list(REQUESTS), help="bytes of a request")
    parser.add_argument("--records", type=_numbers, default=list(RECORDS))
    parser.add_argument("--in-flight", type=_numbers, default=list(IN_FLIGHT))
    parser.add_argument("--no-fit", action="store_true")
    parser.add_argument("--no-blocking", action="store_true")
    parser.add_argument("--record", default="")
    options = parser.parse_args()
    load = psutil.getloadavg()
    with open_arena(options.transports.split(","), options.repeat) as (arena, failed):
        result = {**campaign(arena, options), "did_not_run": failed}
    if options.record:
        note = f"load average at the start {load[0]:.1f}, at the end {psutil.getloadavg()[0]:.1f}, on a shared machine"
        write_record(options.record, result, note=note)


if __name__ == "__main__":
    main()
