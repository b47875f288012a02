"""One source as the destination sees it: the control link, its receiver and heartbeats, and the data peer.

A session belongs to one incarnation of the source and ends with it. Knows no pages.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from core.aio import OnCrash, Tasks
from core.clock import Clock
from core.errors import LeaseLost, TandemError, TransferFailed, WorkerLost
from core.handover import Abort, FromD, FromP, Heartbeat, HeartbeatReply, Hello, HelloReply, Stale
from core.ids import Incarnation, TransferId
from core.kv import KVLayout, decode_layout
from kv_transfer.api import ControlLink, LinkDialer, Peer
from kv_transfer.config import TransferConfig
from kv_transfer.handshake import check_fingerprint, check_layouts, same_records
from kv_transfer.reader import Reader
from kv_transfer.ticket import TransferEvent
from kv_transfer.transfer import Transfer

MISSED_HEARTBEATS = 3
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What the source said of itself at Hello."""

    incarnation: Incarnation
    layout: KVLayout
    exports: dict[str, bytes]
    comparable: bool = True
    """Its records hold our very bytes, so that its digests say something of ours."""


async def introduce(
    dialer: LinkDialer, address: str, hello: Hello, ours: KVLayout, config: TransferConfig
) -> tuple[ControlLink, Introduction]:
    """Dial and shake hands. Raises WorkerLost (unreachable, silent, another incarnation) or NamespaceMismatch."""
    link = await dialer.dial(address, config.connect_timeout_s)
    try:
        async with asyncio.timeout(config.hello_timeout_s):
            await link.send(hello)
            reply = await link.receive()
        return link, _check(reply, address, hello, ours)
    except TimeoutError:
        await link.close()
        raise WorkerLost(f"prefill worker {address} did not answer the handshake in time") from None
    except BaseException:
        await link.close()
        raise


class Session:
    """Open from construction until it is lost or closed. One event loop."""

    def __init__(
        self,
        *,
        address: str,
        link: ControlLink,
        source: Introduction,
        reader: Reader,
        peer: Peer,
        config: TransferConfig,
        clock: Clock,
        on_lost: Callable[["Session"], None],
        on_crash: OnCrash | None = None,
    ) -> None:
        self.address = address
        self.source = source
        self.reader = reader
        self.peer = peer
        self.lost: TandemError | None = None
        self.num_late = 0
        self.doubted = False
        """A read has failed and the data path is being proven once more."""
        self._link = link
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._transfers: dict[TransferId, Transfer] = {}
        self._last_heard = clock.now()
        self._new_lease = asyncio.Event()
        self._tasks = Tasks(on_crash)
        self._tasks.spawn(self._receive(), name=f"KV receiver {address}")
        self._tasks.spawn(self._beat(), name=f"KV heartbeat {address}")

    @property
    def num_transfers(self) -> int:
        """Hand-overs under way."""
        return len(self._transfers)

    def add(self, transfer: Transfer) -> None:
        """Deliver messages of this hand-over from now on; raises WorkerLost if the session is lost."""
        if self.lost is not None:
            raise WorkerLost(self.lost.message)
        if not self._transfers:
            # Nobody listened for answers while nothing was asked.
            self._last_heard = self._clock.now()
        self._transfers[transfer.id] = transfer

    def leased(self) -> None:
        """A hand-over got its lease: its first heartbeat may be due before the next one."""
        self._new_lease.set()

    def remove(self, transfer: Transfer) -> None:
        """Forget a hand-over: its late messages are counted and dropped."""
        self._transfers.pop(transfer.id, None)

    async def send(self, message: FromD) -> None:
        """Send, or lose the session; raises WorkerLost."""
        if self.lost is not None:
            raise WorkerLost(self.lost.message)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._link.send(message)
        except TimeoutError:
            error = WorkerLost(f"prefill worker {self.address} takes no messages")
            self.lose(error)
            raise error from None
        except TandemError as error:
            self.lose(error)
            raise

    def post_abort(self, transfer: TransferId, reason: str) -> None:
        """Tell the source to stop, without waiting: our safety never depends on it."""
        if self.lost is None:
            self._tasks.spawn(self._send_quietly(Abort(transfer=transfer, reason=reason)), name=f"abort {transfer}")

    def lose(self, error: TandemError) -> None:
        """The source is gone or silent: every hand-over with it fails. Idempotent; `close` must follow."""
        if self.lost is not None:
            return
        self.lost = error
        logger.warning("lost prefill worker %s (%s): %s", self.address, self.source.incarnation[:8], error)
        for transfer in list(self._transfers.values()):
            transfer.fail(error, TransferEvent.LOST)
        self._on_lost(self)

    async def close(self) -> None:
        """End the link and the tasks, then, once none of its operations is open, the data peer."""
        if self.lost is None:
            self.lost = WorkerLost("the session was closed")
        await self._tasks.close()
        await self._link.close()
        await self.reader.drained(self.peer)
        await asyncio.to_thread(self.peer.disconnect)

    async def _send_quietly(self, message: FromD) -> None:
        try:
            await self.send(message)
        except TandemError as error:
            logger.debug("message to %s was not sent: %s", self.address, error)

    async def _receive(self) -> None:
        while self.lost is None:
            try:
                message = await self._link.receive()
            except TandemError as error:
                self.lose(error if isinstance(error, WorkerLost) else WorkerLost(error.message))
                return
            except Exception as error:
                logger.exception("the control link to %s broke", self.address)
                self.lose(WorkerLost(f"the control link broke: {error}"))
                return
            self._last_heard = self._clock.now()
            try:
                self._dispatch(message)
            except Exception:
                # One bad message must not silence the others (9.3).
                logger.exception("a message of %s was not understood", self.address)

    def _dispatch(self, message: FromP) -> None:
        if isinstance(message, Stale):
            self.lose(WorkerLost(f"prefill worker {self.address} was restarted"))
        elif isinstance(message, HeartbeatReply):
            for transfer in list(self._transfers.values()):
                if transfer.lease in message.lost:
                    transfer.fail(LeaseLost("the source's lease has lapsed"), TransferEvent.LOST)
        elif not isinstance(message, HelloReply):
            transfer = self._transfers.get(message.transfer)
            if transfer is None:
                self.num_late += 1
            else:
                transfer.deliver(message)

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            lives = [t.expires_in_s for t in self._transfers.values() if t.lease is not None]
            interval = min([self._config.lease_ttl_s / 6, *(life / 3 for life in lives)])
            due = min(due, now() + interval)
            if await self._woken_before(due):
                continue
            due = now() + interval
            if not self._transfers:
                continue
            silence = self._clock.now() - self._last_heard
            if silence > MISSED_HEARTBEATS * self._config.lease_ttl_s / 6:
                self.lose(WorkerLost(f"prefill worker {self.address} was silent for {silence:.1f} s"))
                return
            leases = tuple(t.lease for t in self._transfers.values() if t.lease is not None)
            await self._send_quietly(Heartbeat(leases=leases, ttl_s=self._config.lease_ttl_s))

    async def _woken_before(self, due: float) -> bool:
        """Wait until `due` (False), or until a new lease may need an earlier heartbeat (True)."""
        try:
            async with asyncio.timeout_at(due):
                await self._new_lease.wait()
        except TimeoutError:
            return False
        self._new_lease.clear()
        return True


def _check(reply: FromP, address: str, hello: Hello, ours: KVLayout) -> Introduction:
    if isinstance(reply, Stale):
        raise WorkerLost(f"prefill worker {address} was restarted; it is {reply.incarnation[:8]} now")
    if not isinstance(reply, HelloReply):
        raise TransferFailed(f"prefill worker {address} answered the handshake with {type(reply).__name__}")
    if hello.expected is not None and reply.incarnation != hello.expected:
        raise WorkerLost(f"prefill worker {address} was restarted; it is {reply.incarnation[:8]} now")
    check_fingerprint(hello.fingerprint, reply.fingerprint)
    layout = decode_layout(reply.layout)
    unused = check_layouts(layout, ours)
    if unused:
        logger.info("components %s of prefill worker %s are not needed here", ", ".join(unused), address)
    comparable = same_records(layout, ours)
    if not comparable:
        logger.warning("prefill worker %s shares out heads differently: its KV comes without digests", address)
    return Introduction(
        incarnation=reply.incarnation, layout=layout, exports=dict(reply.exports), comparable=comparable
    )
