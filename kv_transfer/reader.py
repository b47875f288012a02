"""Reads over one transport, on the event loop: bounded in bytes, watched for progress, quarantined without proof.

Knows no messages; the memory of a group of operations has an owner who gets it back by proof only.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import Aborted, NoCapacity, TandemError, TransferFailed
from core.ids import LeaseId, TransferId
from kv_transfer.api import MemoryRegion, Op, OpState, Peer, Records, SupportsCancel, TransportOpener
from kv_transfer.config import TransferConfig
from kv_transfer.plan import split
from kv_transfer.quarantine import Held, MemoryOwner, Quarantine
from kv_transfer.statistics import Counters

COUNTERS = ("bytes_landed", "reads", "records", "reads_failed", "reads_refused_full")
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReadGroup:
    """Operations that write one set of pages (or one staging slot)."""

    transfer: TransferId
    lease: LeaseId
    pages: tuple[int, ...]
    owner: MemoryOwner
    on_failure: Callable[[TandemError], None]
    on_proven: Callable[[], None]
    """Called after the quarantine gave the pages of an abandoned group back."""
    counted: bool = True
    """False for reads that are no hand-over's."""
    ops: list[Op] = field(default_factory=list)
    open_ops: int = 0
    nbytes: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever no operation is open."""


@dataclass(slots=True, eq=False)
class _Flow:
    """What is in flight from one peer, to see whether bytes still come."""

    ops: dict[int, ReadGroup] = field(default_factory=dict)
    closed_bytes: int = 0
    last_seen: int = -1
    last_progress: float = 0.0


class Reader:
    """One per transport name of a destination. Event loop only, but for `_on_event`."""

    def __init__(
        self, name: str, opener: TransportOpener, config: TransferConfig, clock: Clock, extras: Sequence[MemoryRegion]
    ) -> None:
        self.name = name
        self.fenced = False
        self.quarantine = Quarantine()
        self.counters = Counters(COUNTERS)
        self._post_broke = False
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._signalled = False
        self._flows: dict[int, _Flow] = {}
        self._flow_of: dict[int, _Flow] = {}
        self._in_flight = 0
        self._closed_bytes = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._freed = asyncio.Event()
        self.transport = opener.open(name, None, self._on_event)
        for region in extras:
            self.transport.register(region)

    @property
    def num_open(self) -> int:
        """Operations that were posted and not reported over."""
        return len(self._flow_of)

    def link_figures(self) -> tuple[int, int, float]:
        """Return bytes asked for that have not landed, bytes that ever landed, seconds in which any were asked for."""
        landed = sum(op.landed_bytes for op in self._open_ops())
        busy_s = self._busy_s + (self._clock.now() - self._busy_since if self._in_flight else 0.0)
        return self._in_flight - landed, self._closed_bytes + landed, busy_s

    async def post(self, peer: Peer, records: Sequence[Records], group: ReadGroup) -> None:
        """Post all copies, in operations that respect the transport's limits; waits while too much is in flight.

        On return all are posted, not landed. Raises BadRequest or TransferFailed; what was posted before stays in
        the group.
        """
        caps = self.transport.capabilities
        largest = min(caps.max_bytes_per_op, self._config.max_bytes_per_op * caps.op_scale)
        for whole in records:
            for part in split(whole, caps.max_records_per_op, largest):
                await self._post_one(peer, part, group)

    async def landed(self, group: ReadGroup) -> None:
        """Wait until no operation of the group is open. A failure is told to `on_failure`, which ends this wait."""
        while group.open_ops:
            group.done.clear()
            await group.done.wait()

    async def drained(self, peer: Peer) -> None:
        """Wait until no operation with this peer is open."""
        while id(peer) in self._flows:
            await self._freed.wait()

    async def quiet(self) -> None:
        """Wait until no operation is open and nothing is held without proof."""
        while self._flow_of or len(self.quarantine):
            await self._freed.wait()

    def abandon(self, group: ReadGroup) -> bool:
        """Cancel what is open. True if something may still write: then the quarantine holds the memory from now on."""
        if all(self.transport.quiesced(op) for op in group.ops):
            return False
        if isinstance(self.transport, SupportsCancel):
            for op in group.ops:
                if not self.transport.quiesced(op):
                    self.transport.cancel(op)
        self.quarantine.hold(
            Held(
                ops=tuple(group.ops),
                pages=group.pages,
                owner=group.owner,
                since=self._clock.now(),
                on_proven=group.on_proven,
            )
        )
        return True

    def tick(self) -> bool:
        """Release proven memory and fail stalled peers; True if the quarantine needs a fence (R5)."""
        self._collect()
        now = self._clock.now()
        for flow in self._flows.values():
            self._watch(flow, now)
        return (
            self._post_broke
            or self.quarantine.num_pages_since(now - self._config.quarantine_grace_s) > self._config.quarantine_pages
            or self.quarantine.oldest_s(now) > self._config.quarantine_age_s
        )

    async def destroy(self) -> None:
        """Destroy the transport: the proof for everything it ever posted. Idempotent."""
        self.fenced = True
        for flow in self._flows.values():
            for group in set(flow.ops.values()):
                group.on_failure(TransferFailed(f"the {self.name} transport was destroyed"))
        await asyncio.to_thread(self.transport.destroy)
        self._collect()
        self.quarantine.sweep(self.transport)
        self._wake_posters()

    async def _post_one(self, peer: Peer, part: Records, group: ReadGroup) -> None:
        nbytes = part.total_bytes
        while True:
            if self.fenced:
                raise TransferFailed(f"the {self.name} transport was destroyed")
            if self._in_flight and self._in_flight + nbytes > self._config.max_bytes_in_flight:
                await self._freed.wait()
                continue
            now = self._clock.now()
            life = self._config.op_base_timeout_s + (self._in_flight + nbytes) / self._config.op_bytes_per_s
            try:
                op = self.transport.submit(peer, part, group.transfer, group.lease, now + life)
            except NoCapacity:
                # Nothing was posted and the peer is well: the same read again when an earlier one has ended.
                self.counters.add("reads_refused_full")
                if self._flow_of:
                    await self._freed.wait()
                else:
                    await asyncio.sleep(self._config.sweep_interval_s)
                continue
            except TandemError:
                raise  # nothing was posted
            except Exception as error:
                # A post that broke may be in flight; only the end of the transport proves that it is not.
                logger.exception("posting a KV read broke; the %s transport will be fenced", self.name)
                self._post_broke = True
                group.ops.append(Op(-1, group.transfer, nbytes, now, OpState.UNPROVEN))
                raise TransferFailed(f"posting a read failed: {error}") from error
            if group.counted:
                self.counters.add("reads")
                self.counters.add("records", len(part.nbytes))
            self._book(peer, op, group, now)
            return

    def _book(self, peer: Peer, op: Op, group: ReadGroup, now: float) -> None:
        flow = self._flows.setdefault(id(peer), _Flow())
        if not flow.ops:
            flow.last_progress = now
        flow.ops[op.id] = group
        self._flow_of[op.id] = flow
        if not self._in_flight:
            self._busy_since = now
        group.ops.append(op)
        group.open_ops += 1
        group.nbytes += op.nbytes
        self._in_flight += op.nbytes

    def _on_event(self) -> None:
        """From any thread: have the loop collect, once for a burst."""
        if not self._signalled:
            self._signalled = True
            # After the loop has closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._signalled = False
        for op in self.transport.poll():
            flow = self._flow_of.pop(op.id, None)
            if flow is None:
                continue
            group = flow.ops.pop(op.id)
            flow.closed_bytes += op.landed_bytes
            self._in_flight -= op.nbytes
            self._closed_bytes += op.landed_bytes
            if not self._in_flight:
                self._busy_s += self._clock.now() - self._busy_since
            group.open_ops -= 1
            if op.state is OpState.DONE:
                self.counters.add("bytes_landed", op.nbytes if group.counted else 0)
            else:
                self.counters.add("reads_failed")
                group.on_failure(_as_failure(op.error))
            if not group.open_ops:
                group.done.set()
        self._flows = {peer: flow for peer, flow in self._flows.items() if flow.ops}
        self.quarantine.sweep(self.transport)
        self._wake_posters()

    def _open_ops(self) -> list[Op]:
        groups = {group for flow in self._flows.values() for group in flow.ops.values()}
        return [op for group in groups for op in group.ops if op.id in self._flow_of]

    def _wake_posters(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _watch(self, flow: _Flow, now: float) -> None:
        open_ops = [op for group in set(flow.ops.values()) for op in group.ops if op.id in flow.ops]
        seen = flow.closed_bytes + sum(op.landed_bytes for op in open_ops)
        if seen != flow.last_seen:
            flow.last_seen, flow.last_progress = seen, now
        elif now - flow.last_progress >= self._config.progress_timeout_s:
            for group in set(flow.ops.values()):
                group.on_failure(TransferFailed(f"no byte landed for {self._config.progress_timeout_s:g} s"))


def link_statistics(readers: Sequence[Reader]) -> dict[str, float]:
    """Return what waits for the links of all readers, what ever landed, and the seconds in which any was asked for."""
    told = [reader.link_figures() for reader in readers]
    names = ("backlog_bytes", "landed_bytes", "reading_s")
    return {name: float(sum(figures[place] for figures in told)) for place, name in enumerate(names)}


def _as_failure(error: Exception | None) -> TandemError:
    if isinstance(error, TandemError) and not isinstance(error, Aborted):
        return error
    return TransferFailed(f"a read failed: {error}")
