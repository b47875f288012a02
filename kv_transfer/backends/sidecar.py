"""A native engine in a process of its own, as seen from the worker: killing that process is a fence for all it posted.

A crash of the library, a stall of its peer or a lost completion costs the reads in flight and never the worker; the
process maps only the landing ring (or, read-only, the pool). Restarting it is its user's business.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from core.config import native_environment
from core.errors import ConfigError, TransferFailed, from_code
from kv_transfer.api import MemoryRegion, Records
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.backends.sidecar_wire import (
    Answer,
    Connect,
    Disconnect,
    Mapped,
    Open,
    Over,
    ToChild,
    pack,
    receive_reply,
    send,
)

START_TIMEOUT_S = 60.0
"""A process, an interpreter and a native library: a second when the machine is quiet."""
logger = logging.getLogger(__name__)


class Sidecar:
    """See `NativeEngine` for the contract. `on_death` is called once, from another thread, if the process ends by itself."""

    def __init__(
        self,
        spec: EngineSpec,
        regions: Sequence[MemoryRegion],
        directory: str,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        private = [region.id for region in regions if not region.shared_name]
        if private:
            raise ConfigError(f"KV region {private[0]} is not in shared memory, so no sidecar can map it")
        self._on_death = on_death
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._answers: dict[int, Answer | None] = {0: None}
        self._reads: dict[int, Outcome | None] = {}
        self._last = 0
        self._gone = ""
        self._closing = False
        self._process, self._connection, self._lifeline = _spawn()
        self._receiver = threading.Thread(target=self._receive, name="kv-sidecar", daemon=True)
        self._receiver.start()
        mapped = tuple(Mapped(r.id, r.shared_name, r.shared_offset, r.nbytes) for r in regions)
        try:
            self._send(Open(spec, directory, mapped))
            export = self._answer(0, START_TIMEOUT_S)
        except TransferFailed as error:
            self.close()
            raise ConfigError(f"the sidecar of {spec.module} did not start: {error.message}") from error
        except BaseException:
            self.close()
            raise
        assert isinstance(export, bytes)
        self._export = export

    @property
    def pid(self) -> int:
        """Process id, for logs and tests."""
        return self._process.pid

    @property
    def broken(self) -> bool:
        return bool(self._gone)

    def export(self) -> bytes:
        return self._export

    def connect(self, blob: bytes, timeout_s: float) -> int:
        number = self._number(self._answers)
        self._send(Connect(number, blob, timeout_s))
        peer = self._answer(number, timeout_s)
        assert isinstance(peer, int)
        return peer

    def disconnect(self, peer: int) -> None:
        with contextlib.suppress(TransferFailed):
            self._send(Disconnect(peer))

    def post(self, peer: int, records: Records) -> int:
        number = self._number(self._reads)
        self._send(pack(number, peer, records))
        return number

    def wait(self, ticket: int, timeout_s: float) -> Outcome | None:
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._reads[ticket] is not None, timeout_s)
            outcome = self._reads[ticket]
            if outcome is None and not self._gone:
                return None
            del self._reads[ticket]
            # The process has ended, so nothing that it posted can land any more.
            return outcome or Outcome(self._gone)

    def close(self) -> None:
        self._closing = True
        # SIGKILL, not a request: the process may be stuck in the library, and this is the fence.
        self._process.kill()
        self._process.wait()
        self._receiver.join()

    def _number(self, book: dict[int, Answer | None] | dict[int, Outcome | None]) -> int:
        with self._changed:
            self._last += 1
            book[self._last] = None
            return self._last

    def _send(self, frame: ToChild) -> None:
        try:
            with self._sending:
                send(self._connection, frame)
        except OSError:
            # What this frame asked for is answered by the death of the process, which the receiver proves.
            logger.debug("the sidecar takes no frames any more")

    def _answer(self, number: int, timeout_s: float) -> bytes | int:
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._answers[number] is not None, timeout_s)
            answer = self._answers.pop(number)
            if answer is None:
                raise TransferFailed(self._gone or f"the sidecar did not answer within {timeout_s:g} s")
        if answer.code:
            raise from_code(answer.code, answer.error)
        return answer.value

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = receive_reply(self._connection)
                with self._changed:
                    if isinstance(frame, Over):
                        if frame.number in self._reads:
                            self._reads[frame.number] = frame.outcome
                    elif frame.number in self._answers:
                        self._answers[frame.number] = frame
                    elif isinstance(frame.value, int) and not frame.code:
                        self.disconnect(frame.value)  # nobody waited so long for this connection
                    self._changed.notify_all()
        self._process.kill()
        status = self._process.wait()
        with self._changed:
            self._gone = "the sidecar was stopped" if self._closing else f"the sidecar ended with status {status}"
            self._changed.notify_all()
        with self._sending:
            self._connection.close()
            os.close(self._lifeline)
        if not self._closing:
            logger.warning("%s; its reads have failed and nothing of them can land any more", self._gone)
            self._on_death()


def _spawn() -> tuple["subprocess.Popen[bytes]", "Connection[object, object]", int]:
    """Start the child; return it, our end of the socket, and our end of the pipe whose closing ends it."""
    ours, theirs = socket.socketpair()
    read_end, lifeline = os.pipe()
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    sys.executable,
                    "-m",
                    "kv_transfer.backends.sidecar_child",
                    str(theirs.fileno()),
                    str(read_end),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), read_end),
                env=native_environment(),
            )
        finally:
            os.close(read_end)
    return process, Connection(ours.detach()), lifeline
