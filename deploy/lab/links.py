"""Hosts that only our own cables connect: network namespaces whose TAP devices hang on a switch in this process.

For tests, as root on Linux. Small kernels have no netem, so frames wait here and are released on time: delay, loss, rate
and partition for each pair of hosts and direction. The machine's own network is not touched; nothing is left at the end.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

TUNSETIFF, IFF_TAP_NO_PI = 0x400454CA, 0x0002 | 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8922, 0x8914, 1
CLONE_NEWNET = 0x40000000
NET, MASK, MTU = "10.78.0", "255.255.255.0", 9000
FRAME_BYTES = 65536
READS_AT_ONCE = 64
"""Frames taken from one host before the others have their turn."""
_C = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


@dataclass(kw_only=True)
class Link:
    """What happens to frames from one host to another."""

    delay_ms: float = 0.0
    loss: float = 0.0
    """Share of frames that vanish, 0 to 1."""
    mbit: float = 0.0
    """Rate in Mbit/s; 0: no limit."""
    queue_ms: float = 50.0
    """Frames that would wait longer for the rate vanish, as in a real queue."""
    is_up: bool = True
    free_at: float = field(default=0.0, repr=False)


@dataclass
class Host:
    """One namespace: its address, a descriptor that keeps it, and its end of the cable."""

    address: str
    namespace: int
    tap: int


def _call(name: str, *arguments: int) -> None:
    if getattr(_C, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _make_host(address: str) -> Host:
    """Make a namespace with one interface; runs in a thread of its own, which then belongs to the namespace."""
    _call("unshare", CLONE_NEWNET)
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, MASK)):
            packed = struct.pack("16sHH4s16x", b"eth0", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(control, request, packed)
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si20x", b"eth0", MTU))
        for name in (b"eth0", b"lo"):
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP))
    return Host(address, namespace, tap)


class Switch:
    """Hosts by name, each connected with each. Use as a context manager; raises OSError where namespaces are not allowed."""

    def __init__(self, names: Sequence[str], *, seed: int = 0) -> None:
        self.hosts: dict[str, Host] = {}
        self.passed = 0
        """Frames delivered."""
        self.dropped = 0
        self._names = list(names)
        self._links = {(a, b): Link() for a in names for b in names if a != b}
        self._random = random.Random(seed)  # noqa: S311 - chooses frames to lose, guards nothing
        self._places: dict[bytes, str] = {}
        self._waiting: list[tuple[float, int, str, bytes]] = []
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        try:
            for number, name in enumerate(self._names, 1):
                with ThreadPoolExecutor(1) as thread:
                    self.hosts[name] = thread.submit(_make_host, f"{NET}.{number}").result()
        except OSError:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._close()

    def link(self, one: str, other: str, *, both: bool = True) -> Iterator[Link]:
        """Yield the cable's direction from one host to another, and with `both` the way back too: set their fields."""
        yield self._links[one, other]
        if both:
            yield self._links[other, one]

    def shape(self, pairs: Sequence[tuple[str, str]], **fields: float) -> None:
        """Set fields of both directions of some cables, e.g. ``delay_ms=5, loss=0.01``."""
        for pair in pairs:
            for link in self.link(*pair):
                for name, value in fields.items():
                    setattr(link, name, value)

    def cut(self, name: str, *, is_up: bool = False) -> None:
        """Unplug a host, or plug it in again; nobody is told."""
        self.shape([(name, other) for other in self._names if other != name], is_up=is_up)

    def entering(self, name: str) -> list[str]:
        """Return what stands before a command line that shall run on a host."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.hosts[name].namespace}", "--"]

    def on(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread that belongs to a host, and return what it returns."""

        def inside() -> T:
            _call("setns", self.hosts[name].namespace, CLONE_NEWNET)
            return work()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(inside).result()

    def _close(self) -> None:
        for host in self.hosts.values():
            os.close(host.tap)
            os.close(host.namespace)
        self.hosts.clear()

    def _run(self) -> None:
        names = {host.tap: name for name, host in self.hosts.items()}
        with select.epoll() as ready:
            for tap in names:
                ready.register(tap, select.EPOLLIN)
            while not self._stop.is_set():
                wait_s = min(0.2, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else 0.2
                for tap, _ in ready.poll(wait_s):
                    with contextlib.suppress(BlockingIOError):
                        for _ in range(READS_AT_ONCE):
                            self._take(names[tap], os.read(tap, FRAME_BYTES), time.monotonic())
                while self._waiting and self._waiting[0][0] <= time.monotonic():
                    _, _, name, frame = heapq.heappop(self._waiting)
                    self._give(name, frame)

    def _take(self, source: str, frame: bytes, now: float) -> None:
        """Send one frame to whoever has its address, or to all: each cable decides when, if at all."""
        self._places[frame[6:12]] = source
        known = self._places.get(frame[:6])
        for name in [known] if known else [n for n in self._names if n != source]:
            if name == source:
                continue
            link = self._links[source, name]
            at = now
            if link.mbit:
                at = max(now, link.free_at) + len(frame) * 8 / (link.mbit * 1e6)
            is_full = at - now > link.queue_ms / 1e3
            if not link.is_up or is_full or (link.loss and self._random.random() < link.loss):
                self.dropped += 1
                continue
            link.free_at = at
            self._number += 1
            heapq.heappush(self._waiting, (at + link.delay_ms / 1e3, self._number, name, frame))

    def _give(self, name: str, frame: bytes) -> None:
        try:
            os.write(self.hosts[name].tap, frame)
            self.passed += 1
        except OSError:  # its queue is full, as a network card's may be
            self.dropped += 1
