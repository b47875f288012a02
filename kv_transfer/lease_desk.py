"""The source's book of hand-overs: answers the peers' messages, starts and stops prompts, ends every lease exactly once.

Knows no bytes and no transport; what it must do to the engine goes out through `SourceHost`.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable

from core.aio import Tasks
from core.errors import BadRequest, Draining, LeaseLost, TandemError
from core.handover import (
    Abort,
    Aborted,
    Accept,
    Failed,
    FromP,
    Gone,
    Heartbeat,
    HeartbeatReply,
    Prepare,
    Reject,
    Release,
    Released,
)
from core.ids import TransferId
from kv_transfer.api import SourceHost
from kv_transfer.config import TransferConfig
from kv_transfer.lease import LeaseTable
from kv_transfer.source_link import Identity, SourceLink
from kv_transfer.source_transfer import SourceTransfer
from kv_transfer.statistics import Counters
from kv_transfer.ticket import LeaseEvent, LeaseState

COUNTERS = (
    "prepares",
    "renewals",
    "orphans",
    "rejects",
    "releases_valid",
    "releases_invalid",
    "ended_by_abort",
    "ended_by_expire",
    "ended_by_failed",
    "ended_by_unlinked",
    "bytes_handed_over",
    "unknown_messages",
)
MAX_REMEMBERED = 4096
"""Ended hand-overs whose stragglers still get a precise answer."""
logger = logging.getLogger(__name__)


class LeaseDesk:
    """All hand-overs of one source. One event loop; implements `source_link.LinkOwner` but for the exports."""

    def __init__(
        self,
        *,
        identity: Identity,
        config: TransferConfig,
        host: SourceHost,
        leases: LeaseTable,
        tasks: Tasks,
        exports: Callable[[], tuple[tuple[str, bytes], ...]],
    ) -> None:
        self.identity = identity
        self.exports = exports
        self.counters = Counters(COUNTERS)
        self.draining = False
        self._config = config
        self._host = host
        self._leases = leases
        self._tasks = tasks
        self._transfers: dict[TransferId, SourceTransfer] = {}
        self._by_seq: dict[int, SourceTransfer] = {}
        self._ended: OrderedDict[TransferId, bool] = OrderedDict()
        self._starting = 0
        self._early: dict[int, list[Callable[[], None]]] = {}

    def find(self, seq: int, again: Callable[[], None]) -> SourceTransfer | None:
        """Return the hand-over of an engine sequence, or None if it has ended.

        An event may overtake the return of `SourceHost.start`: then `again` is called once the sequence is known.
        """
        transfer = self._by_seq.get(seq)
        if transfer is None and self._starting:
            self._early.setdefault(seq, []).append(again)
            if len(self._early) > MAX_REMEMBERED:
                # Stragglers of ended sequences come first.
                del self._early[next(iter(self._early))]
        return transfer

    def prepare(self, link: SourceLink, message: Prepare) -> None:
        """Grant a lease, answer, and queue the prompt; the same message again gets the same answer."""
        known = self._transfers.get(message.transfer)
        if known is not None and known.link is link and known.prepare == message:
            link.answer(_accept(known))
        elif message.transfer in self._ended:
            link.answer(Gone(transfer=message.transfer))
        else:
            try:
                transfer = self._admit(link, message, known is not None)
            except TandemError as error:
                self.counters.add("rejects")
                link.answer(_reject(message.transfer, error))
                return
            self.counters.add("prepares")
            self._transfers[transfer.id] = transfer
            link.answer(_accept(transfer))
            self._tasks.spawn(self._start(transfer), name=f"start {transfer.id}")

    def release(self, link: SourceLink, message: Release) -> None:
        """Answer Released once; duplicates get the same answer."""
        transfer = self._of(link, message.transfer)
        if transfer is not None and transfer.lease == message.lease:
            self._release(transfer)
        elif message.transfer in self._ended:
            link.answer(Released(transfer=message.transfer, valid=self._ended[message.transfer]))
        else:
            self._answer_gone(link, message.transfer)

    def abort(self, link: SourceLink, message: Abort) -> None:
        """Stop and unpin at once, whatever the state."""
        transfer = self._of(link, message.transfer)
        if transfer is not None:
            self.end(transfer, LeaseEvent.ABORT, Aborted(transfer=transfer.id))
        elif message.transfer in self._ended:
            link.answer(Aborted(transfer=message.transfer))
        else:
            self._answer_gone(link, message.transfer)

    def heartbeat(self, link: SourceLink, message: Heartbeat) -> None:
        """Renew the leases of this link; the reply names those that are over."""
        ttl = min(max(0.0, message.ttl_s), self._config.max_lease_ttl_s)
        own = {transfer.lease for transfer in self._transfers.values() if transfer.link is link}
        lost = tuple(lease for lease in message.leases if lease not in own or not self._leases.renew(lease, ttl))
        self.counters.add("renewals", len(message.leases) - len(lost))
        link.answer(HeartbeatReply(lost=lost))

    def unlinked(self, link: SourceLink) -> None:
        """The link broke: a reader that still lives will find its release refused."""
        for transfer in list(self._transfers.values()):
            if transfer.link is link:
                self.end(transfer, LeaseEvent.UNLINKED, None)

    def expire(self) -> None:
        """End every hand-over whose lease has lapsed."""
        for lease in self._leases.expired():
            transfer = self._transfers.get(lease.transfer)
            if transfer is not None and transfer.lease == lease.id:
                logger.warning("lease of %s lapsed in state %s", transfer.id, transfer.machine.state)
                self.counters.add("orphans", 0 if lease.renewed else 1)
                self.end(transfer, LeaseEvent.EXPIRE, failed_message(transfer, LeaseLost("the lease lapsed")))

    def end_all(self, error: TandemError) -> None:
        """Fail every hand-over."""
        for transfer in list(self._transfers.values()):
            self.end(transfer, LeaseEvent.FAILED, failed_message(transfer, error))

    def end(self, transfer: SourceTransfer, event: LeaseEvent, answer: FromP | None, *, valid: bool = False) -> None:
        """The one place where a hand-over ends: lease, engine, tables, last word. The first end wins."""
        if not transfer.machine.move(event):
            return
        self._leases.end(transfer.lease)
        del self._transfers[transfer.id]
        if transfer.seq is not None:
            del self._by_seq[transfer.seq]
            self._host.stop(transfer.seq)
        self._ended[transfer.id] = valid
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._count(transfer, event, valid)
        if answer is not None:
            transfer.link.answer(answer)

    def _count(self, transfer: SourceTransfer, event: LeaseEvent, valid: bool) -> None:
        if event is not LeaseEvent.RELEASE:
            self.counters.add(f"ended_by_{event}")
        elif valid:
            self.counters.add("releases_valid")
            link = transfer.link
            self.counters.add("bytes_handed_over", transfer.announced_pages * link.page_bytes + link.row_bytes)
        else:
            self.counters.add("releases_invalid")

    def _admit(self, link: SourceLink, message: Prepare, known: bool) -> SourceTransfer:
        assert link.peer is not None
        size, prefix = self.identity.layout.page_tokens, message.prefix_tokens
        if known:
            raise BadRequest("a hand-over of that name is under way already")
        if self.draining:
            raise Draining("this prefill worker is going away")
        if prefix < 0 or prefix % size or prefix >= len(message.request.token_ids):
            raise BadRequest(f"prefix_tokens {prefix} is not a page border inside the prompt", param="prefix_tokens")
        ttl = min(message.lease_ttl_s, self._config.max_lease_ttl_s)
        if not ttl > 0:
            raise BadRequest("lease_ttl_s must be positive", param="lease_ttl_s")
        lease, life = self._leases.grant(link.peer, message.transfer, ttl)
        return SourceTransfer(prepare=message, link=link, lease=lease, expires_in_s=life, page_tokens=size)

    async def _start(self, transfer: SourceTransfer) -> None:
        request = transfer.prepare.request
        self._starting += 1
        try:
            seq = await self._host.start(request, request.timeout_s)
        except TandemError as error:
            self.end(transfer, LeaseEvent.FAILED, failed_message(transfer, error))
            return
        finally:
            self._starting -= 1
            early, self._early = self._early, self._early if self._starting else {}
        if transfer.machine.ended:
            early.pop(seq, None)
            self._host.stop(seq)
            return
        transfer.seq = seq
        self._by_seq[seq] = transfer
        transfer.machine.move(LeaseEvent.STARTED)
        for again in early.pop(seq, ()):
            again()

    def _release(self, transfer: SourceTransfer) -> None:
        unchanged = False
        if transfer.machine.state is LeaseState.FINAL and transfer.seq is not None:
            with contextlib.suppress(TandemError):
                unchanged = self._host.epochs_unchanged(transfer.seq)
        valid = self._leases.end(transfer.lease) and unchanged
        self.end(transfer, LeaseEvent.RELEASE, Released(transfer=transfer.id, valid=valid), valid=valid)

    def _of(self, link: SourceLink, name: TransferId) -> SourceTransfer | None:
        transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.link is link else None

    def _answer_gone(self, link: SourceLink, name: TransferId) -> None:
        self.counters.add("unknown_messages")
        link.answer(Gone(transfer=name))


def failed_message(transfer: SourceTransfer, error: TandemError) -> Failed:
    """Return the message that tells the peer of an error."""
    return Failed(
        transfer=transfer.id, code=error.code, message=error.message, retry_after_s=error.retry_after_s or 0.0
    )


def _reject(name: TransferId, error: TandemError) -> Reject:
    return Reject(transfer=name, code=error.code, message=error.message, retry_after_s=error.retry_after_s or 0.0)


def _accept(transfer: SourceTransfer) -> Accept:
    return Accept(transfer=transfer.id, lease=transfer.lease, expires_in_s=transfer.expires_in_s)
