"""One pull: the steps of a hand-over at the destination, and the one place where a failed one lets go.

Pages are allocated when a chunk is ready and read while the source computes the next one; row state lands in staging;
nothing counts before the source says that its lease held. Knows no gRPC and no engine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import Aborted, ChecksumMismatch, DeadlineExceeded, TandemError, TransferFailed, WorkerLost
from core.handover import ChunkReady, Final, FromD, Release
from core.kv import KVLayout
from kv_transfer.api import DestinationHost, Pulled
from kv_transfer.config import TransferConfig
from kv_transfer.digest import page_digests, paged_names, row_digests, row_names
from kv_transfer.plan import Span, plan_pages, plan_rows
from kv_transfer.reader import ReadGroup
from kv_transfer.session import Session
from kv_transfer.staging import Staging
from kv_transfer.statistics import Counters, Observe
from kv_transfer.ticket import TransferEvent
from kv_transfer.transfer import Transfer, first_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PullParts:
    """What all pulls of a destination share."""

    config: TransferConfig
    layout: KVLayout
    host: DestinationHost
    staging: Staging
    hasher: Executor
    """Computes digests off the loop."""
    clock: Clock
    observe: Observe
    counters: Counters


@dataclass(frozen=True, slots=True)
class _Landed:
    """A chunk whose pages are being read."""

    chunk: ChunkReady
    pages: tuple[int, ...]
    group: ReadGroup


@dataclass(slots=True, eq=False)
class Pull:
    """One event loop; `drive` is called once."""

    parts: PullParts
    session: Session
    transfer: Transfer
    seq: int
    row: int
    chunks: list[_Landed] = field(default_factory=list)
    slot: int | None = None
    row_group: ReadGroup | None = None
    covered: int = 0
    """Tokens below this are ours or being read."""
    asked: bool = False
    num_unproven: int = 0
    """Groups in quarantine."""

    def __post_init__(self) -> None:
        self.covered = self.transfer.prepare.prefix_tokens

    async def drive(self, timeout_s: float) -> Pulled:
        """Run to the end. Unless this returns, the host was told to drop the sequence, exactly once."""
        transfer, loop = self.transfer, asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        timer = loop.call_later(
            timeout_s, transfer.fail, DeadlineExceeded(f"the pull took longer than {timeout_s:g} s")
        )
        body = loop.create_task(self._run(), name=f"pull {transfer.id}")
        transfer.bind(body.cancel)
        returned = False
        try:
            pulled = await body
            transfer.check()
            returned = True
        except asyncio.CancelledError:
            # Either the failure of the hand-over interrupted the body, or somebody cancelled the caller.
            if transfer.failure is None or task.cancelling() > cancels:
                raise
            raise transfer.failure from None
        except TandemError as error:
            transfer.fail(error)
            raise
        finally:
            timer.cancel()
            body.cancel()
            if returned:
                self._finish()
            else:
                self._let_go()
        return pulled

    async def _run(self) -> Pulled:
        transfer, reader = self.transfer, self.session.reader
        told = self.parts.clock.now()
        await self._prepare()
        told = self._stage("prepare", told)
        if not self.parts.config.pull_chunks:
            await transfer.finished()
        land_s = 0.0
        while (chunk := await transfer.next_chunk()) is not None:
            transfer.check()
            began = self.parts.clock.now()
            await self._land(chunk)
            land_s = self.parts.clock.now() - began
        final = transfer.final
        assert final is not None
        told = self._stage("queue", told)
        self.parts.observe("land", reader.name, land_s)
        self._check_coverage(final)
        if self.parts.staging.needed:
            await self._read_row(final)
        for group in self._groups():
            await reader.landed(group)
        transfer.check()
        told = self._stage("wire", told)
        if transfer.prepare.digests:
            await self._check_digests(final)
            transfer.check()
        if self.slot is not None:
            self.parts.staging.copy_out(self.slot, self.row)
        told = self._stage("verify", told)
        await self._release()
        self._stage("commit", told)
        return Pulled(
            first=first_tokens(final),
            num_tokens=final.num_tokens,
            bytes_pulled=sum(group.nbytes for group in self._groups()),
            chunks=len(self.chunks),
        )

    def _stage(self, name: str, since: float) -> float:
        """Tell how long a stage took; return when it ended."""
        now = self.parts.clock.now()
        self.parts.observe(name, self.session.reader.name, now - since)
        return now

    def _finish(self) -> None:
        self.session.remove(self.transfer)
        if self.slot is not None:
            self.parts.staging.release(self.slot)

    def _let_go(self) -> None:
        """Abort at the source, cancel reads, hand the pages back. Synchronous: nothing can interrupt it."""
        transfer, reader = self.transfer, self.session.reader
        self.session.remove(transfer)
        transfer.fail(Aborted("the pull was cancelled"))
        if self.asked:
            self.session.post_abort(transfer.id, transfer.failure.message if transfer.failure else "cancelled")
        open_groups = [group for group in self._groups() if reader.abandon(group)]
        if self.slot is not None and self.row_group not in open_groups:
            self.parts.staging.release(self.slot)
        self.num_unproven = len(open_groups)
        if not transfer.machine.ended:
            # Committed, then cancelled before anybody heard of it: nothing is open then.
            transfer.machine.move(TransferEvent.DROPPED if open_groups else TransferEvent.PROVEN)
        open_pages = [page for group in open_groups if group is not self.row_group for page in group.pages]
        self.parts.host.drop(self.seq, tuple(open_pages))

    async def _prepare(self) -> None:
        config, transfer = self.parts.config, self.transfer
        self.session.add(transfer)
        self.asked = True
        try:
            await self._ask(transfer.prepare, transfer.accepted, config.prepare_timeout_s)
        except TimeoutError:
            # Whether the whole peer is lost is for the heartbeats to say.
            raise WorkerLost(f"the source did not answer PREPARE within {config.prepare_timeout_s:g} s") from None
        self.session.leased()

    async def _land(self, chunk: ChunkReady) -> None:
        transfer, parts = self.transfer, self.parts
        size, total = parts.layout.page_tokens, len(transfer.prepare.request.token_ids)
        whole = chunk.end == total or chunk.end % size == 0
        if not self.chunks and chunk.start < self.covered and chunk.start % size == 0:
            # The source computed behind a shorter hit than our prefix; from there on its pages are of another kind.
            self.covered = chunk.start
        if chunk.start != self.covered or not chunk.start < chunk.end <= total or not whole:
            raise TransferFailed(
                f"the source announced tokens {chunk.start}..{chunk.end} of {total} when {self.covered} was due"
            )
        pages = await parts.host.land(self.seq, chunk.start, chunk.end)
        transfer.check()
        if len(pages) != len(chunk.pages):
            raise TransferFailed(f"{len(pages)} pages were found here for {len(chunk.pages)} of the source")
        assert transfer.lease is not None
        group = ReadGroup(transfer.id, transfer.lease, pages, parts.host, transfer.fail, self._proven)
        self.chunks.append(_Landed(chunk, pages, group))
        self.covered = chunk.end
        records = plan_pages(
            self.session.source.layout,
            parts.layout,
            Span(chunk.start, chunk.end, [ref.page for ref in chunk.pages]),
            Span(chunk.start, chunk.end, pages),
            parts.config.max_run_bytes,
        )
        await self.session.reader.post(self.session.peer, records, group)

    async def _read_row(self, final: Final) -> None:
        transfer, staging = self.transfer, self.parts.staging
        assert transfer.lease is not None
        self.slot = await staging.acquire()
        records = plan_rows(
            self.session.source.layout, staging.layout, final.row, self.slot, self.parts.config.max_run_bytes
        )
        self.row_group = ReadGroup(transfer.id, transfer.lease, (self.slot,), staging, transfer.fail, self._proven)
        await self.session.reader.post(self.session.peer, records, self.row_group)

    async def _release(self) -> None:
        config, transfer = self.parts.config, self.transfer
        transfer.machine.move(TransferEvent.LANDED)
        assert transfer.lease is not None
        transfer.release_sent = True
        try:
            await self._ask(
                Release(transfer=transfer.id, lease=transfer.lease), transfer.released, config.release_timeout_s
            )
        except TimeoutError:
            raise TransferFailed(f"the source did not answer RELEASE within {config.release_timeout_s:g} s") from None

    async def _ask(self, question: FromD, answered: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Send and wait; once more at half-time, because the same question gets the same answer."""
        await self.session.send(question)
        try:
            async with asyncio.timeout(timeout_s / 2):
                await answered()
                return
        except TimeoutError:
            self.parts.counters.add("questions_repeated")
            await self.session.send(question)
        async with asyncio.timeout(timeout_s / 2):
            await answered()

    def _check_coverage(self, final: Final) -> None:
        total = len(self.transfer.prepare.request.token_ids)
        if final.num_tokens != total or self.covered != total:
            raise TransferFailed(
                f"the source ended with {final.num_tokens} tokens and chunks up to {self.covered}, of {total}"
            )

    async def _check_digests(self, final: Final) -> None:
        run, parts = asyncio.get_running_loop().run_in_executor, self.parts
        ours, staging, theirs = parts.layout, parts.staging, self.session.source.layout
        needed = {component.name for component in ours.components}
        paged = [name for name in paged_names(theirs) if name in needed]
        rows = [name for name in row_names(theirs) if name in needed]
        for landed in self.chunks:
            found = await run(parts.hasher, page_digests, ours, paged, landed.pages, staging.views)
            if found != landed.chunk.digests:
                bad = [p for p, a, b in zip(landed.pages, found, landed.chunk.digests, strict=False) if a != b]
                raise ChecksumMismatch(
                    f"pages {bad[:8]} of tokens {landed.chunk.start}..{landed.chunk.end} differ from what was announced"
                )
        if self.slot is not None:
            found = await run(parts.hasher, row_digests, staging.layout, rows, self.slot, staging.views)
            if found != final.row_digests:
                raise ChecksumMismatch("the row state differs from what was announced")

    def _proven(self) -> None:
        """The quarantine gave back one group of a pull that was let go."""
        self.num_unproven -= 1
        if not self.num_unproven:
            self.transfer.machine.move(TransferEvent.PROVEN)

    def _groups(self) -> list[ReadGroup]:
        groups = [landed.group for landed in self.chunks]
        return groups if self.row_group is None else [*groups, self.row_group]
