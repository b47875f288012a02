"""How long the thread that calls a transport is blocked in the call, told apart from what the machine takes from it.

Of each call: wall time, its own CPU time, and the time it was ready and waited for a core, as the kernel counts it. What is
left is blocking: locks, the interpreter lock, system calls that wait. A thread that holds the interpreter lock may lose its
core too, and then others are blocked by the machine: the row without a transport shows how often, where a bare thread
copies the same records and the calls do nothing. Beside each row a process without any of this wants to run every
millisecond: how late it is shows what the machine does to everybody.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import msgspec

from core.errors import NoCapacity
from kv_transfer.api import Records
from kv_transfer.memory import U8
from kv_transfer.views import copy_slices

IN_FLIGHT = 8
PERIOD_S = 0.001
T = TypeVar("T")
LONG_S = 0.005
"""A scheduler that is blocked for longer has missed its goal."""
_SECONDS = 3.0

_CONTROL = """
import sys, time
late = []
print(flush=True)
import threading
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
while not end.is_set():
    start = time.perf_counter()
    time.sleep({period})
    late.append(time.perf_counter() - start - {period})
print(late)
"""


class Caller(Protocol):
    """What is measured: something that posts reads and polls."""

    transport: Any
    """A `Transport`, or what can be polled like one."""

    def submit(self, records: Records) -> Any:
        """Post one read; raises NoCapacity."""
        ...


class Call(msgspec.Struct, frozen=True):
    """Seconds of one call."""

    wall: float
    cpu: float
    queued: float

    @property
    def blocked(self) -> float:
        """Neither running nor ready to run."""
        return max(0.0, self.wall - self.cpu - self.queued)


class Bare:
    """Nothing to call, and a thread that copies records all the time."""

    def __init__(self, target: U8, source: U8) -> None:
        self.transport = SimpleNamespace(poll=lambda: [SimpleNamespace(id=0)])
        self._memory = target, source
        self._records: Records | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def submit(self, records: Records) -> SimpleNamespace:
        """Have the thread copy these from now on."""
        self._records = records
        return SimpleNamespace(id=0)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _copy(self) -> None:
        target, source = self._memory
        while not self._stop.is_set():
            if (records := self._records) is None:
                time.sleep(PERIOD_S)
                continue
            columns = (records.target_offsets.tolist(), records.source_offsets.tolist(), records.nbytes.tolist())
            copy_slices(target, source, zip(*columns, strict=True))


def blocking(
    readers: Mapping[str, Caller], reads_of: Callable[[int], list[Records]], target: U8, source: U8
) -> dict[str, object]:
    """Return rows by transport and record size; `reads_of(record bytes)` are what to read."""
    bare = Bare(target, source)
    try:
        rows = _rows({"no transport": bare}, reads_of)
    finally:
        bare.close()
    return rows | _rows(readers, reads_of)


def _rows(readers: Mapping[str, Caller], reads_of: Callable[[int], list[Records]]) -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, reader in readers.items():
        for record in (4096, 65536):
            records = reads_of(record)
            with control() as late:
                calls = drive(reader, records, _SECONDS)
            rows[f"{name} {record}"] = {**row(calls), "control": lateness(late)}
    return rows


def drive(reader: Caller, records: Sequence[Records], seconds: float) -> list[Call]:
    """Post and poll every millisecond as a scheduler would; returns every call. On a thread of its own."""
    calls: list[Call] = []

    def run() -> None:
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        open_ops: set[int] = set()
        number, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end or open_ops:
            if len(open_ops) < IN_FLIGHT and time.perf_counter() < end:
                with contextlib.suppress(NoCapacity):
                    op = timed(schedstat, lambda at=number: reader.submit(records[at % len(records)]), calls)
                    open_ops.add(op.id)
                    number += 1
            for op in timed(schedstat, reader.transport.poll, calls):
                open_ops.discard(op.id)
            time.sleep(PERIOD_S)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return calls


def timed(schedstat: Path, call: Callable[[], T], calls: list[Call]) -> T:
    """Call and note what it took, the reading of the kernel's figures included: blocking is never told too short."""
    wall, cpu, queued = time.perf_counter(), time.thread_time(), _queued_s(schedstat)
    try:
        return call()
    finally:
        queued = _queued_s(schedstat) - queued
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        calls.append(Call(wall, cpu, queued))


@contextlib.contextmanager
def control() -> Iterator[list[float]]:
    """Run the process without transfers meanwhile; the list is filled at the end."""
    late: list[float] = []
    with subprocess.Popen(
        [sys.executable, "-c", _CONTROL.format(period=PERIOD_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        yield late
        child.stdin.close()
        late += msgspec.json.decode(child.stdout.readline(), type=list[float])


def row(calls: Sequence[Call]) -> dict[str, object]:
    """Sum up the calls of one transport."""
    parts = {part: sorted(getattr(call, part) for call in calls) for part in ("wall", "cpu", "queued", "blocked")}
    figures = {
        f"{part}_{name}_us": round(1e6 * values[int(len(values) * at)], 1)
        for part, values in parts.items()
        for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1 - 1e-9))
    }
    return {"calls": len(calls), **figures, "blocked_over_5_ms": sum(value > LONG_S for value in parts["blocked"])}


def lateness(late: Sequence[float]) -> dict[str, float]:
    """Sum up the process without transfers."""
    values = sorted(late)
    return {
        "p50_us": round(1e6 * values[len(values) // 2], 1),
        "p99_us": round(1e6 * values[int(len(values) * 0.99)], 1),
        "max_us": round(1e6 * values[-1], 1),
        "over_5_ms": sum(value > LONG_S for value in values),
    }


def _queued_s(schedstat: Path) -> float:
    return int(schedstat.read_text().split()[1]) / 1e9
