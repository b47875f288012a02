"""The source's record of one hand-over: its lease, what was announced, and what is still held back. Pure.

Announces whole pages only, until the prompt's last chunk, and nothing below the prefix that the destination holds.
Knows no engine.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from core.handover import ChunkReady, Final, Prepare
from core.ids import LeaseId, TransferId
from core.kv import PageRef
from kv_transfer.source_link import SourceLink
from kv_transfer.ticket import LeaseEvent, LeaseState, Machine, lease_machine


@dataclass(slots=True, eq=False)
class SourceTransfer:
    """Owned by `Source`; one event loop."""

    prepare: Prepare
    link: SourceLink
    lease: LeaseId
    expires_in_s: float
    page_tokens: int
    machine: Machine[LeaseState, LeaseEvent] = field(default_factory=lease_machine)
    seq: int | None = None
    """The engine's sequence, once the prompt is queued."""
    num_chunks: int = 0
    announced_end: int = 0
    """Tokens below this are announced or not wanted."""
    announced_pages: int = 0
    outbox: deque[ChunkReady | Final] = field(default_factory=deque)
    """Announcements that wait for their digests; see `Announcer`."""
    announcing: bool = False

    def __post_init__(self) -> None:
        self.announced_end = self.prepare.prefix_tokens

    @property
    def id(self) -> TransferId:
        """The hand-over's name."""
        return self.prepare.transfer

    @property
    def num_tokens(self) -> int:
        """Length of the prompt (and earlier outputs)."""
        return len(self.prepare.request.token_ids)

    def note_hits(self, hits: tuple[int, ...]) -> None:
        """Learn, before anything is announced, which replay hits the pages are computed behind.

        Unless the request fixed its floors, the destination kept pages of an undivided computation: from the first hit
        on ours differ, so it needs them whatever it holds.
        """
        if hits and not self.num_chunks and self.prepare.request.floors is None:
            self.announced_end = min(self.announced_end, hits[0])

    def chunk(self, start: int, end: int, pages: tuple[PageRef, ...]) -> ChunkReady | None:
        """Take final pages of tokens [start, end) and return what to announce now, if anything.

        Chunks come in order; one that starts beyond what is known would leave a hole and is our own bug.
        """
        size = self.page_tokens
        border = end if end >= self.num_tokens else end // size * size
        first = self.announced_end
        if border <= first:
            return None
        base = start // size
        assert base <= first // size, f"chunk {start}..{end} leaves a hole after {first}"
        chosen = pages[first // size - base : -(-border // size) - base]
        message = ChunkReady(transfer=self.id, chunk=self.num_chunks, start=first, end=border, pages=chosen)
        self.num_chunks += 1
        self.announced_end = border
        self.announced_pages += len(chosen)
        return message

    def final(self, aux: Final) -> Final:
        """Return the aux row as it goes out: with our name and the number of chunks announced."""
        return msgspec.structs.replace(aux, transfer=self.id, num_chunks=self.num_chunks)
