"""The source's end of one control link: the handshake, then each message to whom it belongs.

Total: every message in every state has an answer or is ignored; nothing a peer sends is an exception, except that a pair
which must not exist is refused at Hello. Knows no lease and no engine.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.errors import BadRequest, NamespaceMismatch
from core.handover import Abort, FromD, FromP, Heartbeat, Hello, HelloReply, Prepare, Release, Stale
from core.ids import Incarnation
from core.kv import ComponentKind, KVLayout, decode_layout
from kv_transfer.handshake import check_fingerprint, check_layouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who the source is, as its links tell it."""

    incarnation: Incarnation
    fingerprint: bytes
    layout: KVLayout


class LinkOwner(Protocol):
    """What a link asks of its source."""

    identity: Identity

    def exports(self) -> tuple[tuple[str, bytes], ...]:
        """(transport, blob) in order of preference."""
        ...

    def prepare(self, link: "SourceLink", message: Prepare) -> None:
        """Grant a lease and queue the prompt, or reject."""
        ...

    def release(self, link: "SourceLink", message: Release) -> None:
        """Answer whether the lease held, and unpin."""
        ...

    def abort(self, link: "SourceLink", message: Abort) -> None:
        """Stop and unpin."""
        ...

    def heartbeat(self, link: "SourceLink", message: Heartbeat) -> None:
        """Renew leases of this link."""
        ...

    def unlinked(self, link: "SourceLink") -> None:
        """The link is over: so are its leases."""
        ...


class SourceLink:
    """Made by `Source.open_link`. One event loop."""

    def __init__(self, owner: LinkOwner, send: Callable[[FromP], None]) -> None:
        self._owner = owner
        self._send = send
        self._closed = False
        self.peer: Incarnation | None = None
        """Set by a good Hello."""
        self.page_bytes = 0
        """Bytes of one page that this peer reads."""
        self.row_bytes = 0
        self.page_names: tuple[str, ...] = ()
        """Components that this peer reads, in our layout's order."""
        self.row_names: tuple[str, ...] = ()

    async def handle(self, message: FromD) -> None:
        """Handle one message; answers go to `send`.

        Raises `NamespaceMismatch` (another fingerprint or layout) or `BadRequest` (no Hello yet): close the stream
        with that error.
        """
        if self._closed:
            return
        if isinstance(message, Hello):
            self._hello(message)
        elif self.peer is None:
            raise BadRequest("the first message of a link must be Hello")
        elif isinstance(message, Prepare):
            self._owner.prepare(self, message)
        elif isinstance(message, Release):
            self._owner.release(self, message)
        elif isinstance(message, Abort):
            self._owner.abort(self, message)
        else:
            self._owner.heartbeat(self, message)

    def answer(self, message: FromP) -> None:
        """Send to the peer, unless the link is over."""
        if not self._closed:
            self._send(message)

    def closed(self) -> None:
        """The stream ended: all its leases end. Idempotent."""
        if not self._closed:
            self._closed = True
            self._owner.unlinked(self)

    def _hello(self, message: Hello) -> None:
        identity = self._owner.identity
        if message.expected is not None and message.expected != identity.incarnation:
            self.answer(Stale(incarnation=identity.incarnation))
            return
        try:
            check_fingerprint(identity.fingerprint, message.fingerprint)
            theirs = decode_layout(message.layout)
            unused = check_layouts(identity.layout, theirs)
        except NamespaceMismatch as error:
            logger.warning("refused decode worker %s: %s", message.incarnation[:8], error)
            raise
        if unused:
            logger.info("decode worker %s does not read components %s", message.incarnation[:8], ", ".join(unused))
        self._size_up(identity.layout, unused)
        self.peer = message.incarnation
        self.answer(
            HelloReply(
                incarnation=identity.incarnation,
                fingerprint=identity.fingerprint,
                layout=identity.layout.encode(),
                exports=self._owner.exports(),
            )
        )

    def _size_up(self, layout: KVLayout, unused: tuple[str, ...]) -> None:
        read = [component for component in layout.components if component.name not in unused]
        paged = [component for component in read if component.kind is ComponentKind.PAGED]
        rows = [component for component in read if component.kind is not ComponentKind.PAGED]
        self.page_names = tuple(component.name for component in paged)
        self.row_names = tuple(component.name for component in rows)
        self.page_bytes = sum(component.record_bytes for component in paged)
        self.row_bytes = sum(component.record_bytes for component in rows)
