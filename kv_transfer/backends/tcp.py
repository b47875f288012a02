"""Reads over plain sockets: the embedded default between hosts.

One connection and one thread per source. The thread asks for records and lands the answer straight in the target
region, frame by frame; a cancelled read lands nothing more after the frame it is in, the rest goes to scratch.
"""

import bisect
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from core.clock import Clock
from core.errors import Aborted, LeaseLost, TandemError, TransferFailed
from kv_transfer.api import Capabilities, PeerInfo, Records, SourceGuard
from kv_transfer.backends.lane import Job
from kv_transfer.backends.lane_transport import LanePeer, LaneTransport, Shared
from kv_transfer.backends.tcp_server import TcpServer
from kv_transfer.backends.tcp_wire import (
    FRAME,
    MAGIC,
    MAX_RECORDS,
    STATUSES,
    Status,
    TcpExport,
    encode_cancel,
    encode_read,
    greeting,
    receive_exactly,
    send_all,
    shut,
    tune,
)
from kv_transfer.settings import TransportSettings
from kv_transfer.views import Bytes, DeviceView, copy_slices

CAPABILITIES = Capabilities(
    name="tcp",
    version="1",
    max_records_per_op=MAX_RECORDS,
    max_bytes_per_op=1 << 30,
    max_ops_in_flight_per_peer=64,
    same_host_only=False,
    read_is_safe_for_source=True,
    cancel_is_fence=True,
    landing="direct",
)


class TcpPeer(LanePeer):
    """A source behind a socket. A broken connection fails the read it carried and is made anew for the next one."""

    def __init__(self, info: PeerInfo, shared: Shared, export: TcpExport) -> None:
        self._export = export
        self._sizes = dict(export.regions)
        self._connection: socket.socket | None = None
        self._asked: deque[int] = deque()
        """Operations whose answers come over the connection, in order."""
        on_device = next((v for v in shared.regions.views.values() if isinstance(v, DeviceView)), None)
        nbytes = shared.config.frame_bytes
        # What goes on to a device does so many times faster from memory that the device knows.
        self._scratch = (
            memoryview(bytearray(nbytes)) if on_device is None else on_device.cuda.pinned(on_device.device, nbytes).data
        )
        super().__init__(info, shared)

    def source_sizes(self) -> Mapping[int, int]:
        return self._sizes

    def warm(self, timeout_s: float) -> None:
        """Connect now, before the first read, so that an unreachable source shows at once."""
        self._connection = self._connect(timeout_s)

    def disconnect(self) -> None:
        super().disconnect()
        self._hang_up()

    def read(self, job: Job) -> None:
        job.check(self.shared.clock)
        if self._connection is None:
            self._connection = self._connect(self.shared.config.connect_timeout_s)
        try:
            self._ask(self._connection, job)
            if (following := self.lane.following) is not None:
                # The source goes on with it at once, while we are still busy with the end of this one.
                self._ask(self._connection, following)
            self._skip_to(self._connection, job)
            self._land(self._connection, job)
        except OSError as error:
            self._hang_up()
            raise TransferFailed(f"the data connection broke: {error}") from error
        except LeaseLost:
            # The answer was read to its end: the connection is in order.
            raise
        except TandemError:
            self._hang_up()
            raise

    def _ask(self, connection: socket.socket, job: Job) -> None:
        records = job.records
        if job.op.id not in self._asked:
            self._asked.append(job.op.id)
            request = encode_read(job.op.id, job.lease, records.source_region, records.source_offsets, records.nbytes)
            send_all(connection, [request])

    def _skip_to(self, connection: socket.socket, job: Job) -> None:
        """Throw away the answers to reads that were cancelled before their turn."""
        patience = self._patience(self.shared.config.progress_timeout_s, job)
        while self._asked[0] != job.op.id:
            send_all(connection, [encode_cancel(self._asked[0])])
            self._drain(connection, self._header(connection, patience), patience)

    def _land(self, connection: socket.socket, job: Job) -> None:
        landing = Landing(job.records, self.shared.regions.views[job.records.target_region], self._scratch)
        patience = self._patience(self.shared.config.progress_timeout_s, job)

        def on_bytes(got: int) -> None:
            # The header of the next frame comes with the bytes of this one.
            job.op.landed_bytes = min(job.op.landed_bytes + got, landing.taken)
            patience.bytes_came()

        status, nbytes = self._header(connection, patience)
        while status == Status.DATA:
            try:
                job.check(self.shared.clock)
            except TandemError as error:
                # Nothing of the job lands from here on: say so, then throw away what is still on its way.
                self.shared.ledger.close(job.op, error)
                send_all(connection, [encode_cancel(job.op.id)])
                self._drain(connection, (status, nbytes), self._patience(self.shared.config.progress_timeout_s))
                return
            head = bytearray(FRAME.size)
            receive_exactly(connection, [*landing.take(nbytes), memoryview(head)], patience.idle, on_bytes)
            landing.settle()
            status, nbytes = self._parse(head)
        self._asked.popleft()
        _conclude(status, landing)

    def _drain(self, connection: socket.socket, header: tuple[Status, int], patience: "Patience") -> None:
        """Read an answer from this header on to its end, into scratch."""
        status, nbytes = header
        while status == Status.DATA:
            receive_exactly(connection, [self._scratch[:nbytes]], patience.idle)
            patience.bytes_came()
            status, nbytes = self._header(connection, patience)
        self._asked.popleft()

    def _header(self, connection: socket.socket, patience: "Patience") -> tuple[Status, int]:
        head = bytearray(FRAME.size)
        receive_exactly(connection, [memoryview(head)], patience.idle)
        return self._parse(head)

    def _parse(self, head: bytearray) -> tuple[Status, int]:
        """Return status and payload bytes of a frame that must answer the oldest question."""
        number, op, nbytes = FRAME.unpack(head)
        status = STATUSES.get(number)
        if status is None or nbytes > len(self._scratch):
            raise TransferFailed(f"the peer sent a frame of status {number} and {nbytes} bytes")
        if op != self._asked[0]:
            raise TransferFailed("the peer answered another read")
        return status, nbytes

    def _connect(self, timeout_s: float) -> socket.socket:
        where = f"{self._export.host}:{self._export.port}"
        try:
            connection = socket.create_connection((self._export.host, self._export.port), timeout_s)
        except OSError as error:
            raise TransferFailed(f"the KV data port {where} cannot be reached: {error}") from error
        try:
            tune(connection, self.shared.config.progress_timeout_s)
            send_all(connection, [greeting(self.info.incarnation, self._export.token)])
            reply = bytearray(len(MAGIC))
            receive_exactly(connection, [memoryview(reply)], self._patience(timeout_s).idle)
            if bytes(reply) != MAGIC:
                raise TransferFailed(f"{where} does not speak our protocol")
        except (OSError, TandemError) as error:
            shut(connection)
            raise TransferFailed(f"the KV data port {where} refused us: {error}") from error
        return connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            shut(self._connection)
            self._connection = None
        self._asked.clear()

    def _patience(self, timeout_s: float, job: Job | None = None) -> "Patience":
        return Patience(self.shared.clock, timeout_s, job, lambda: self.lane.stopped)


class Patience:
    """Decides, each time nothing came for a moment, whether to go on waiting."""

    def __init__(self, clock: Clock, timeout_s: float, job: Job | None, stopped: Callable[[], bool]) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._job = job
        self._stopped = stopped
        self._last = clock.now()

    def bytes_came(self) -> None:
        """Progress."""
        self._last = self._clock.now()

    def idle(self) -> None:
        """Raise if the job was cancelled or is late, the lane stops, or nothing came for too long."""
        if self._job is not None:
            self._job.check(self._clock)
        if self._stopped():
            raise Aborted("the peer was disconnected")
        if self._clock.now() - self._last >= self._timeout_s:
            raise TransferFailed(f"no byte came for {self._timeout_s:g} s")


class Landing:
    """Where the next bytes of a read belong. Those for a device come to `scratch` first, a frame at a time."""

    def __init__(self, records: Records, target: Bytes, scratch: memoryview) -> None:
        self._target = target
        self._scratch = scratch
        self._unsettled: list[tuple[int, int]] = []
        """(start, stop) in the device's region of what lies in scratch, in order."""
        self._starts: list[int] = records.target_offsets.tolist()
        self._stops: list[int] = (records.target_offsets + records.nbytes).tolist()
        self._ends: list[int] = records.nbytes.cumsum().tolist()
        self._at = 0
        """The first record that has not its whole place taken, and how much of it has."""
        self._part = 0
        self.taken = 0

    @property
    def complete(self) -> bool:
        """True if every byte has a place taken."""
        return self._at == len(self._ends)

    def take(self, nbytes: int) -> list[memoryview]:
        """Return the places of the next `nbytes`, in order; raises TransferFailed if that is more than was asked for.

        `settle` must follow when they are filled.
        """
        places = self._places(nbytes)
        if isinstance(self._target, DeviceView):
            self._unsettled = places
            return [self._scratch[:nbytes]]
        memory = self._target.data
        return [memory[start:stop] for start, stop in places]

    def settle(self) -> None:
        """The places taken last are filled: move on what does not lie where it belongs."""
        if not self._unsettled:
            return
        places, self._unsettled = self._unsettled, []
        begins = itertools.accumulate((stop - start for start, stop in places), initial=0)
        copies = [(start, begin, stop - start) for (start, stop), begin in zip(places, begins, strict=False)]
        copy_slices(self._target, np.frombuffer(self._scratch, np.uint8), copies)

    def _places(self, nbytes: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the places of the next `nbytes` in the target."""
        taken = self.taken + nbytes
        if taken > (self._ends[-1] if self._ends else 0):
            raise TransferFailed("the peer sent more bytes than were asked for")
        last = bisect.bisect_right(self._ends, taken, self._at)
        places = list(zip(self._starts[self._at : last], self._stops[self._at : last], strict=True))
        if places and self._part:
            places[0] = places[0][0] + self._part, places[0][1]
        begun = 0 if places else self._part
        self._at, self.taken = last, taken
        self._part = taken - (self._ends[last - 1] if last else 0)
        if self._part > begun:
            places.append((self._starts[last] + begun, self._starts[last] + self._part))
        return places


def _conclude(status: Status, landing: Landing) -> None:
    if status == Status.REFUSED:
        raise LeaseLost("the source refused the read: the lease is over or does not cover it")
    if status != Status.END:
        raise TransferFailed(f"the source ended the read with {status.name}")
    if not landing.complete:
        raise TransferFailed("the source sent fewer bytes than were asked for")


class TcpTransport(LaneTransport):
    """See the module."""

    def __init__(
        self, settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
    ) -> None:
        super().__init__(CAPABILITIES, settings, guard, clock, on_event)
        self._server: TcpServer | None = None

    def _serve(self, guard: SourceGuard) -> bytes:
        config = self._shared.config
        if self._server is None:
            self._server = TcpServer(config, self._shared.settings.incarnation, self._shared.regions, guard)
        regions = tuple((region.id, region.nbytes) for region in self._shared.regions.regions.values())
        return msgspec.msgpack.encode(
            TcpExport(
                host=config.advertise_host or config.host,
                port=self._server.port,
                token=self._server.token,
                regions=regions,
            )
        )

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _open_peer(self, info: PeerInfo, timeout_s: float) -> TcpPeer:
        try:
            export = msgspec.msgpack.decode(info.blob, type=TcpExport)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"the peer's tcp description cannot be read: {error}") from error
        peer = TcpPeer(info, self._shared, export)
        with contextlib.ExitStack() as undo:
            undo.callback(peer.disconnect)
            peer.warm(timeout_s)
            undo.pop_all()
        return peer


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> TcpTransport:
    """Open the tcp transport."""
    return TcpTransport(settings, guard, clock, on_event)
