"""Sends a source's chunk announcements in order, with digests computed off the event loop when the peer asked for them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from core.aio import Tasks
from core.handover import ChunkReady, Final
from core.kv import KVLayout
from kv_transfer.api import MemoryRegion
from kv_transfer.device import Cuda
from kv_transfer.digest import page_digests, row_digests
from kv_transfer.source_link import SourceLink
from kv_transfer.source_transfer import SourceTransfer
from kv_transfer.views import views_of


class Announcer:
    """One per source; one event loop and one thread."""

    def __init__(
        self, layout: KVLayout, regions: Sequence[MemoryRegion], tasks: Tasks, cuda: Cuda | None = None
    ) -> None:
        self._layout = layout
        self._views = views_of(regions, cuda)
        self._tasks = tasks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    def announce(self, transfer: SourceTransfer, link: SourceLink, message: ChunkReady | Final) -> None:
        """Send now, or after the digests of it and of everything announced before it."""
        if not transfer.prepare.digests:
            link.answer(message)
            return
        # Bounded by the number of chunks of one prompt.
        transfer.outbox.append(message)
        if not transfer.announcing:
            transfer.announcing = True
            self._tasks.spawn(self._send_in_order(transfer, link), name=f"announce {transfer.id}")

    def close(self) -> None:
        """Wait for the digest in progress: afterwards the memory may go. The tasks must be cancelled before."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _send_in_order(self, transfer: SourceTransfer, link: SourceLink) -> None:
        try:
            while transfer.outbox and not transfer.machine.ended:
                message = await self._with_digests(link, transfer.outbox.popleft())
                if not transfer.machine.ended:
                    link.answer(message)
        finally:
            transfer.announcing = False

    async def _with_digests(self, link: SourceLink, message: ChunkReady | Final) -> ChunkReady | Final:
        run = asyncio.get_running_loop().run_in_executor
        if isinstance(message, ChunkReady):
            pages = [ref.page for ref in message.pages]
            digests = await run(self._thread, page_digests, self._layout, link.page_names, pages, self._views)
            return msgspec.structs.replace(message, digests=digests)
        digests = await run(self._thread, row_digests, self._layout, link.row_names, message.row, self._views)
        return msgspec.structs.replace(message, row_digests=digests)
