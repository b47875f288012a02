"""The pulling side of hand-overs: sessions with sources, readers over transports, pulls, and their quarantine.

One `Destination` per decode worker, on its event loop. Nobody else writes this worker's pools (decision A1). Knows no gRPC
and no engine.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from core.aio import OnCrash
from core.clock import Clock
from core.errors import (
    Aborted,
    ChecksumMismatch,
    DeadlineExceeded,
    LeaseLost,
    NoCapacity,
    TandemError,
    TransferFailed,
)
from core.handover import Hello, Prepare
from core.ids import Incarnation, transfer_id
from core.kv import KVLayout
from core.request import GenerateRequest
from kv_transfer.api import DestinationHost, LinkDialer, MemoryRegion, OnFirst, Pulled, TransportOpener
from kv_transfer.breaker import Breaker
from kv_transfer.config import TransferConfig
from kv_transfer.device import Cuda
from kv_transfer.pull import Pull, PullParts
from kv_transfer.session import Session
from kv_transfer.session_book import SessionBook, is_answer, is_peer_failure
from kv_transfer.staging import Staging
from kv_transfer.statistics import Counters, Observe, observe_nothing
from kv_transfer.transfer import Transfer

logger = logging.getLogger(__name__)
COUNTERS = ("pulls", "pulls_committed", "pulls_failed", "pulls_cancelled", "bytes_pulled", "chunks")
FAILURES = ("digest_failures", "leases_lost", "questions_repeated")


class Destination:
    """Pulls KV of remote prefills into this worker's pools. Make it on the running loop; `close` before the memory goes."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        incarnation: Incarnation,
        fingerprint: bytes,
        layout: KVLayout,
        regions: Sequence[MemoryRegion],
        host: DestinationHost,
        dialer: LinkDialer,
        opener: TransportOpener,
        clock: Clock,
        on_crash: OnCrash | None = None,
        observe: Observe = observe_nothing,
        cuda: Cuda | None = None,
    ) -> None:
        """`cuda` moves the bytes of regions on a device, of rows and for digests; needed if there are such."""
        self._config = config
        self._incarnation = incarnation
        self._staging = Staging(layout, regions, config.staging_rows, config.max_run_bytes, incarnation, cuda=cuda)
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
        self._counters = Counters((*COUNTERS, *FAILURES))
        self._parts = PullParts(
            config=config,
            layout=layout,
            host=host,
            staging=self._staging,
            hasher=self._hasher,
            clock=clock,
            observe=observe,
            counters=self._counters,
        )
        self._book = SessionBook(
            config=config,
            hello=Hello(incarnation=incarnation, fingerprint=fingerprint, layout=layout.encode()),
            layout=layout,
            dialer=dialer,
            opener=opener,
            clock=clock,
            regions=regions,
            staging=self._staging.region,
            on_crash=on_crash,
        )
        self._number = 0
        self._transfers: set[Transfer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False

    async def pull(
        self,
        *,
        request: GenerateRequest,
        seq: int,
        row: int,
        prefix_tokens: int,
        address: str,
        incarnation: Incarnation | None,
        timeout_s: float,
        on_first: OnFirst,
    ) -> Pulled:
        """Let the source at `address` prefill `request` and pull the result into sequence `seq`, row `row`.

        `on_first` is called once, on the loop, when the final arrives. On any error and on cancellation
        `DestinationHost.drop` has been called exactly once; after a return it never is. Raises WorkerLost (before or
        after `on_first`), NoCapacity, Draining, BadRequest and so on as the source says, LeaseLost, TransferFailed,
        ChecksumMismatch, NamespaceMismatch, DeadlineExceeded, Aborted (we are closing).
        """
        self._counters.add("pulls")
        breaker = self._book.breaker(address)
        refusal = self._refusal(address, breaker)
        if refusal is not None:
            self._counters.add("pulls_failed")
            self._parts.host.drop(seq, ())
            raise refusal
        session: Session | None = None
        try:
            session = await self._session(address, incarnation, seq, timeout_s)
            transfer = Transfer(self._prepare(request, session, prefix_tokens), on_first)
            pulled = await self._drive(Pull(self._parts, session, transfer, seq, row), timeout_s)
        except BaseException as error:
            self._judge(breaker, error, session)
            raise
        breaker.succeeded()
        self._counters.add("pulls_committed")
        self._counters.add("bytes_pulled", pulled.bytes_pulled)
        self._counters.add("chunks", pulled.chunks)
        return pulled

    def statistics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        gauges = {"transfers": float(len(self._transfers))}
        return self._counters.snapshot() | gauges | self._book.statistics()

    async def close(self) -> None:
        """Cancel all pulls, wait for quiescence, destroy the transports. Memory may be unmapped afterwards. Idempotent."""
        self._closing = True
        for transfer in list(self._transfers):
            transfer.fail(Aborted("the decode worker is going away"))
        await self._idle.wait()
        await self._book.close()
        self._hasher.shutdown(wait=True, cancel_futures=True)
        self._staging.close()

    def _refusal(self, address: str, breaker: Breaker) -> TandemError | None:
        if self._closing:
            return Aborted("the decode worker is going away")
        if breaker.allow():
            return None
        # Not WorkerLost: that is what the failures were; told again it would count against the peer once more.
        return NoCapacity(
            f"prefill worker {address} failed repeatedly and is left alone for a while",
            retry_after_s=breaker.retry_after_s,
        )

    async def _session(self, address: str, incarnation: Incarnation | None, seq: int, timeout_s: float) -> Session:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._book.session(address, incarnation)
        except TimeoutError:
            self._parts.host.drop(seq, ())
            raise DeadlineExceeded(f"the pull took longer than {timeout_s:g} s") from None
        except BaseException:
            self._parts.host.drop(seq, ())
            raise

    def _prepare(self, request: GenerateRequest, session: Session, prefix_tokens: int) -> Prepare:
        self._number += 1
        name = transfer_id(
            request.request_id, request.attempt, session.source.incarnation, self._incarnation, self._number
        )
        return Prepare(
            transfer=name,
            request=request,
            prefix_tokens=prefix_tokens,
            lease_ttl_s=self._config.lease_ttl_s,
            digests=self._config.digests and session.source.comparable,
        )

    async def _drive(self, pull: Pull, timeout_s: float) -> Pulled:
        self._transfers.add(pull.transfer)
        self._idle.clear()
        try:
            return await pull.drive(timeout_s)
        finally:
            self._transfers.discard(pull.transfer)
            if not self._transfers:
                self._idle.set()

    def _judge(self, breaker: Breaker, error: BaseException, session: Session | None) -> None:
        self._counters.add("pulls_failed" if isinstance(error, TandemError) else "pulls_cancelled")
        if isinstance(error, ChecksumMismatch):
            logger.error("%s", error.message)
            self._counters.add("digest_failures")
        elif isinstance(error, LeaseLost):
            self._counters.add("leases_lost")
        if is_peer_failure(error, session):
            breaker.failed()
            if session is not None and isinstance(error, TransferFailed):
                self._book.doubt(session)
        elif is_answer(error):
            breaker.succeeded()
        else:
            breaker.undecided()
