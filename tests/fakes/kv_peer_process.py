"""The other end of a transport as a process of its own, to be killed and stopped by signals.

    python -m tests.fakes.kv_peer_process source TRANSPORT DIRECTORY NUM_PAGES PAGE_BYTES
    python -m tests.fakes.kv_peer_process reader TRANSPORT DIRECTORY NBYTES LEASE INFO

`source` prints one JSON line {info, lease} and serves until its standard input ends; `reader` reads everything again and
again and prints a line after each read has begun. INFO is hex of msgpack of PeerInfo.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from core.ids import LeaseId
from kv_transfer.api import PeerInfo
from tests.fakes.kv_ends import copies, open_ends

ROOT = Path(__file__).resolve().parents[2]


def serve(transport: str, directory: str, num_pages: int, page_bytes: int) -> None:
    with open_ends(transport, directory) as ends:
        source = ends.source(num_pages, page_bytes)
        info = msgspec.msgpack.encode(source.transport.export()).hex()
        print(json.dumps({"info": info, "lease": source.lease(range(num_pages))}), flush=True)
        sys.stdin.read()


def read_for_ever(transport: str, directory: str, nbytes: int, lease: int, info: str) -> None:
    with open_ends(transport, directory) as ends:
        target = ends.target(nbytes)
        peer = target.transport.connect(msgspec.msgpack.decode(bytes.fromhex(info), type=PeerInfo), 5.0)
        while True:
            op = target.read(peer, copies([0], [0], [nbytes]), LeaseId(lease))
            while not op.landed_bytes and not target.transport.quiesced(op):
                target.news.wait(0.001)
            print("reading", flush=True)
            target.wait(op)


class PeerProcess:
    """A child that this process started, and its signals."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.kv_peer_process", *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        """The process and its sidecar, as a stalled host would."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        me = psutil.Process(self.process.pid)
        for one in (me, *me.children(recursive=True)):
            one.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.resume()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def peer_process(*arguments: object) -> Iterator[PeerProcess]:
    peer = PeerProcess(*arguments)
    try:
        yield peer
    finally:
        peer.close()


if __name__ == "__main__":
    mode, name, where, *rest = sys.argv[1:]
    if mode == "source":
        serve(name, where, int(rest[0]), int(rest[1]))
    else:
        read_for_ever(name, where, int(rest[0]), int(rest[1]), rest[2])
