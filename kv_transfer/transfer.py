"""The destination's record of one hand-over: takes the source's messages in any order and number, gives them out once.

Duplicates are ignored, chunks are put in order, the first decision wins. Knows no memory and no transport.
"""

import asyncio
from collections.abc import Callable

from core.errors import ConfigError, InvariantError, LeaseLost, TandemError, TransferFailed, from_code
from core.handover import Accept, ChunkReady, Failed, Final, FromP, Gone, Prepare, Reject, Released
from core.ids import LeaseId, TransferId
from kv_transfer.api import FirstTokens, OnFirst
from kv_transfer.ticket import TransferEvent, transfer_machine

MAX_CHUNKS_AHEAD = 4096
"""Chunks that may wait for an earlier one or for room; a source that sends more is broken."""


class Transfer:
    """One event loop."""

    def __init__(self, prepare: Prepare, on_first: OnFirst) -> None:
        self.prepare = prepare
        self.machine = transfer_machine()
        self.lease: LeaseId | None = None
        self.expires_in_s = 0.0
        self.final: Final | None = None
        self.failure: TandemError | None = None
        self.release_sent = False
        self._valid = False
        self._on_first = on_first
        self._first_told = False
        self._interrupt: Callable[[], object] | None = None
        self._chunks: dict[int, ChunkReady] = {}
        self._next = 0
        self._changed = asyncio.Event()

    @property
    def id(self) -> TransferId:
        """The hand-over's name."""
        return self.prepare.transfer

    def bind(self, interrupt: Callable[[], object]) -> None:
        """Have `interrupt` called once when the hand-over fails: it must make the waiting pull stop."""
        self._interrupt = interrupt

    def fail(self, error: TandemError, event: TransferEvent = TransferEvent.CANCEL) -> None:
        """Decide that the hand-over fails with `error`; ignored if it was decided before."""
        if self.failure is None and self.machine.move(event):
            self.failure = error
            if self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        """Raise what the hand-over failed with, if it did."""
        if self.failure is not None:
            raise self.failure

    def deliver(self, message: FromP) -> None:
        """Take one message of the source. Total: what does not fit the state changes nothing."""
        self._changed.set()
        match message:
            case Accept():
                if self.machine.move(TransferEvent.ACCEPT):
                    self.lease, self.expires_in_s = message.lease, message.expires_in_s
                    if self._chunks or self.final is not None:
                        self.machine.move(TransferEvent.CHUNK)
                    self._tell_first()
            case Reject():
                # After Accept a rejection can only answer a duplicate of our own Prepare.
                if self.lease is None:
                    self.fail(_error(message), TransferEvent.REJECT)
            case ChunkReady():
                self._take_chunk(message)
            case Final():
                if self.final is None and self.machine.move(TransferEvent.FINAL):
                    self.final = message
                    self._tell_first()
            case Failed():
                self.fail(_error(message), TransferEvent.FAILED)
            case Gone():
                self.fail(LeaseLost("the source does not know the hand-over any more"), TransferEvent.GONE)
            case Released():
                self._take_released(message)
            case _:
                pass

    async def accepted(self) -> None:
        """Wait for the lease."""
        while self.lease is None:
            await self._wait()

    async def next_chunk(self) -> ChunkReady | None:
        """Wait for the next chunk in order; None after the last one, when the final is known too."""
        while True:
            chunk = self._chunks.pop(self._next, None)
            if chunk is not None:
                self._next += 1
                return chunk
            if self.final is not None and self._next >= self.final.num_chunks:
                return None
            await self._wait()

    async def finished(self) -> None:
        """Wait for the final."""
        while self.final is None:
            await self._wait()

    async def released(self) -> None:
        """Wait for the source's word that the lease held to the end."""
        while not self._valid:
            await self._wait()

    def _take_chunk(self, message: ChunkReady) -> None:
        if message.chunk < self._next or message.chunk in self._chunks:
            return
        if message.chunk >= self._next + MAX_CHUNKS_AHEAD:
            self.fail(TransferFailed(f"the source sent chunk {message.chunk} while {self._next} is due"))
        elif self.machine.move(TransferEvent.CHUNK):
            self._chunks[message.chunk] = message

    def _take_released(self, message: Released) -> None:
        if not self.release_sent:
            return
        if not message.valid:
            self.fail(LeaseLost("the source's lease did not hold until the pages were safe"), TransferEvent.INVALID)
        elif self.machine.move(TransferEvent.VALID):
            self._valid = True

    def _tell_first(self) -> None:
        """Forward the first token as soon as both the lease and the final are known, before the rest is read."""
        final = self.final
        if final is None or self.lease is None or self._first_told:
            return
        self._first_told = True
        if not final.first_tokens:
            self.fail(TransferFailed("the source ended the prefill without a token"))
            return
        self._on_first(first_tokens(final))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def first_tokens(final: Final) -> FirstTokens:
    """Return what the client may see at once."""
    return FirstTokens(
        tokens=final.first_tokens,
        logprobs=final.logprobs,
        num_cached_tokens=final.num_cached_tokens,
        finish=final.finish,
        floors=final.floors,
    )


def _error(message: Reject | Failed) -> TandemError:
    error = from_code(message.code, message.message, retry_after_s=message.retry_after_s or None)
    if isinstance(error, InvariantError | ConfigError) or type(error) is TandemError:
        # The peer's own trouble, not ours: here it is only a hand-over that did not happen.
        return TransferFailed(f"the source failed: {error.message}")
    return error
