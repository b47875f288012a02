"""A transport whose every byte moves only when the test says so: the adversary of the lifetime tests.

A cancelled or failed operation may go on writing for as long as the test likes before it is proven over.
"""

from collections.abc import Callable, Mapping

import numpy as np

from core.errors import Aborted, TransferFailed
from core.ids import LeaseId, TransferId
from kv_transfer.api import Capabilities, MemoryRegion, Op, OpState, PeerInfo, Records, SourceGuard
from kv_transfer.memory import region_view
from kv_transfer.probe import PROBE_LEASE, probe_bytes

CAPABILITIES = Capabilities(
    name="manual",
    version="1",
    max_records_per_op=3,
    max_bytes_per_op=1 << 20,
    max_ops_in_flight_per_peer=1000,
    same_host_only=True,
    read_is_safe_for_source=True,
    cancel_is_fence=False,
    landing="direct",
)


class ManualPeer:
    def __init__(self, info: PeerInfo, views: Mapping[int, object]) -> None:
        self.info = info
        self.views = views

    def disconnect(self) -> None:
        pass


class ManualWork:
    """One operation and what is left of it."""

    def __init__(self, op: Op, records: Records, source, target) -> None:
        self.op = op
        self.cancelled = False
        self.todo = []
        for s, t, n in zip(
            records.source_offsets.tolist(), records.target_offsets.tolist(), records.nbytes.tolist(), strict=True
        ):
            self.todo.append((source, target, s, t, n))


class ManualTransport:
    """Reads from `peers_views`: the regions of the one source of the test."""

    def __init__(self, source_views: Mapping[int, object], on_event: Callable[[], None]) -> None:
        self.capabilities = CAPABILITIES
        self.source_views = source_views
        self.views = {}
        self.open: list[ManualWork] = []
        self.destroyed = False
        self._changed: list[Op] = []
        self._on_event = on_event
        self._next = 0

    def register(self, region: MemoryRegion) -> None:
        self.views[region.id] = region_view(region)

    def export(self) -> PeerInfo:
        raise AssertionError("only the reading half exists")

    def connect(self, info: PeerInfo, timeout_s: float) -> ManualPeer:
        return ManualPeer(info, self.source_views)

    def submit(self, peer, records: Records, transfer: TransferId, lease: LeaseId, deadline: float) -> Op:
        if self.destroyed:
            raise TransferFailed("destroyed")
        self._next += 1
        op = Op(self._next, transfer, records.total_bytes, 0.0)
        if lease == PROBE_LEASE:
            at, page = int(records.target_offsets[0]), probe_bytes(peer.info.incarnation)
            self.views[records.target_region][at : at + len(page)] = np.frombuffer(page, np.uint8)
            op.state, op.landed_bytes = OpState.DONE, op.nbytes
            self._changed.append(op)
            self._on_event()
            return op
        source, target = self.source_views[records.source_region], self.views[records.target_region]
        self.open.append(ManualWork(op, records, source, target))
        return op

    def poll(self) -> list[Op]:
        changed, self._changed = self._changed, []
        return changed

    def quiesced(self, op: Op) -> bool:
        return self.destroyed or op.state in (OpState.DONE, OpState.FAILED)

    def cancel(self, op: Op) -> None:
        for work in self.open:
            if work.op is op:
                work.cancelled = True

    def destroy(self) -> None:
        for work in list(self.open):
            self._end(work, OpState.FAILED, Aborted("destroyed"))
        self.destroyed = True

    # What the test does.

    def advance(self, work: ManualWork, copies: int) -> None:
        """Write the next records, cancelled or not; the last one ends the operation."""
        for _ in range(min(copies, len(work.todo))):
            source, target, s, t, n = work.todo.pop(0)
            target[t : t + n] = source[s : s + n]
            work.op.landed_bytes += n
        if not work.todo:
            # An operation that already failed for its user ends as FAILED: now it is proven over.
            failed = work.op.state is OpState.UNPROVEN
            self._end(work, OpState.FAILED if failed else OpState.DONE, work.op.error)

    def fail_without_proof(self, work: ManualWork) -> None:
        """Report an error while the operation may still write."""
        if work.op.state is OpState.POSTED:
            work.op.state = OpState.UNPROVEN
            work.op.error = TransferFailed("timed out")
            self._changed.append(work.op)
            self._on_event()

    def stop(self, work: ManualWork) -> None:
        """A cancelled operation notices."""
        if work.cancelled:
            self._end(work, OpState.FAILED, Aborted("cancelled"))

    def _end(self, work: ManualWork, state: OpState, error: Exception | None) -> None:
        self.open.remove(work)
        work.op.state, work.op.error = state, error
        self._changed.append(work.op)
        self._on_event()


class ManualOpener:
    """Opens manual transports over this side's regions, reading the given source."""

    def __init__(self, regions, source_regions) -> None:
        self._regions = regions
        self._source_views = {region.id: region_view(region) for region in source_regions}
        self.opened: list[ManualTransport] = []

    def open(self, name: str, guard: SourceGuard | None, on_event: Callable[[], None]) -> ManualTransport:
        transport = ManualTransport(self._source_views, on_event)
        for region in self._regions:
            transport.register(region)
        self.opened.append(transport)
        return transport

    @property
    def works(self) -> list[ManualWork]:
        return [work for transport in self.opened for work in transport.open]
