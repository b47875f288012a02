"""All sessions and readers of one destination: opens them on demand, shares them, fences and closes them.

Knows no hand-over: a lost session fails its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from core.aio import OnCrash, Tasks
from core.clock import Clock
from core.errors import Aborted, ConfigError, DeadlineExceeded, InvariantError, TandemError, TransferFailed, WorkerLost
from core.handover import Hello
from core.ids import Incarnation
from core.kv import KVLayout
from kv_transfer.api import LinkDialer, MemoryRegion, Peer, PeerInfo, TransportOpener
from kv_transfer.breaker import Breaker, BreakerState
from kv_transfer.config import TransferConfig
from kv_transfer.factory import BACKENDS
from kv_transfer.handshake import transport_order
from kv_transfer.memory import is_on_device
from kv_transfer.probe import Prober, unseal
from kv_transfer.reader import COUNTERS, Reader, link_statistics
from kv_transfer.session import Introduction, Session, introduce
from kv_transfer.statistics import transport_statistics

logger = logging.getLogger(__name__)


class SessionBook:
    """One event loop; make it on the running loop."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        hello: Hello,
        layout: KVLayout,
        dialer: LinkDialer,
        opener: TransportOpener,
        clock: Clock,
        regions: Sequence[MemoryRegion],
        staging: MemoryRegion | None,
        on_crash: OnCrash | None,
    ) -> None:
        self._config = config
        self._hello = hello
        self._layout = layout
        self._dialer = dialer
        self._opener = opener
        self._clock = clock
        self._on_device = is_on_device(regions)
        extras = () if staging is None else (staging,)
        self._prober = Prober((*regions, *extras), clock)
        self._extras = (*extras, self._prober.region)
        self._sessions: dict[str, Session] = {}
        self._readers: dict[str, Reader] = {}
        self._breakers: dict[str, Breaker] = {}
        self._opening: dict[tuple[str, Incarnation | None], asyncio.Task[Session]] = {}
        self._num_fences = 0
        self._fenced = dict.fromkeys((f"{name}_{transport}" for name in COUNTERS for transport in BACKENDS), 0.0)
        self._num_late = 0
        self._closing = False
        self._on_crash = on_crash
        # The sweeper is the only one who gives back unproven pages: without it this process is of no use.
        self._tasks = Tasks(on_crash)
        self._tasks.spawn(self._sweep(), name="KV sweeper")

    def breaker(self, address: str) -> Breaker:
        """Return the circuit breaker of an address."""
        config = self._config
        return self._breakers.setdefault(
            address,
            Breaker(
                self._clock,
                failures=config.breaker_failures,
                min_s=config.breaker_min_s,
                max_s=config.breaker_max_s,
            ),
        )

    async def session(self, address: str, incarnation: Incarnation | None) -> Session:
        """Return the live session with a source, opening it if need be; callers that wait share one attempt.

        Raises WorkerLost, TransferFailed (no transport connects), NamespaceMismatch, Aborted (closing).
        """
        if self._closing:
            raise Aborted("the decode worker is going away")
        known = self._sessions.get(address)
        if known is not None and known.lost is None and incarnation in (None, known.source.incarnation):
            return known
        key = (address, incarnation)
        task = self._opening.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open(address, incarnation), name=f"open {address}")
            self._opening[key] = task
            task.add_done_callback(lambda done: self._opened(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Aborted("the decode worker is going away") from None

    def statistics(self) -> dict[str, float]:
        """Gauges by name."""
        now, readers = self._clock.now(), list(self._readers.values())
        breakers = self._breakers.values()
        return {
            "sessions": float(len(self._sessions)),
            "open_ops": float(sum(reader.num_open for reader in readers)),
            **link_statistics(readers),
            "unproven_pages": float(sum(reader.quarantine.num_pages for reader in readers)),
            "unproven_oldest_s": max((reader.quarantine.oldest_s(now) for reader in readers), default=0.0),
            "fences": float(self._num_fences),
            "late_messages": float(self._num_late + sum(session.num_late for session in self._sessions.values())),
            "breakers_open": float(sum(breaker.state is not BreakerState.CLOSED for breaker in breakers)),
            **self._by_transport(),
        }

    def _by_transport(self) -> dict[str, float]:
        values = dict(self._fenced)
        for reader in self._readers.values():
            for name, value in reader.counters.snapshot().items():
                values[f"{name}_{reader.name}"] = values.get(f"{name}_{reader.name}", 0.0) + value
        return values | transport_statistics({reader.name: reader.transport for reader in self._readers.values()})

    async def close(self) -> None:
        """Order of R8: no new sessions, wait for quiescence up to the deadline, destroy the transports."""
        self._closing = True
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                for reader in self._readers.values():
                    await reader.quiet()
        for reader in self._readers.values():
            await reader.destroy()
            assert not len(reader.quarantine), "destroying a transport is the proof for all it posted"
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        await self._tasks.close()
        self._prober.close()

    async def _open(self, address: str, incarnation: Incarnation | None) -> Session:
        hello = Hello(
            incarnation=self._hello.incarnation,
            expected=incarnation,
            fingerprint=self._hello.fingerprint,
            layout=self._hello.layout,
        )
        link, source = await introduce(self._dialer, address, hello, self._layout, self._config)
        try:
            reader, peer = await self._connect(address, source)
        except BaseException:
            await link.close()
            raise
        session = Session(
            address=address,
            link=link,
            source=source,
            reader=reader,
            peer=peer,
            config=self._config,
            clock=self._clock,
            on_lost=self._lost,
            on_crash=self._on_crash,
        )
        old = self._sessions.get(address)
        self._sessions[address] = session
        if old is not None:
            old.lose(WorkerLost(f"prefill worker {address} was restarted"))
        return session

    def _opened(self, key: tuple[str, Incarnation | None], task: "asyncio.Task[Session]") -> None:
        del self._opening[key]
        if not task.cancelled() and task.exception() is not None:
            self.breaker(key[0]).failed()

    async def _connect(self, address: str, source: Introduction) -> tuple[Reader, Peer]:
        reasons: list[str] = []
        for name in transport_order(self._config.transports, tuple(source.exports), on_device=self._on_device):
            try:
                reader = self._readers.get(name) or self._open_reader(name)
                sealed = unseal(source.exports[name])
                info = PeerInfo(transport=name, incarnation=source.incarnation, blob=sealed.blob)
                peer = await self._proven(reader, info, sealed.probe_region)
            except (TransferFailed, ConfigError) as error:
                # A transport that was asked for by name and does not work must not pass in silence.
                level = logging.WARNING if name in self._config.transports else logging.INFO
                logger.log(level, "KV from %s cannot go over %s: %s", address, name, error)
                reasons.append(f"{name}: {error}")
                continue
            logger.info("KV from %s goes over %s", address, name)
            return reader, peer
        raise TransferFailed(f"no KV transport connects to {address} ({'; '.join(reasons)})")

    async def _proven(self, reader: Reader, info: PeerInfo, probe_region: int) -> Peer:
        """Connect and read the source's probe page; the half-open trial of a breaker is this read."""
        timeout_s = self._config.connect_timeout_s
        peer = await asyncio.to_thread(reader.transport.connect, info, timeout_s)
        try:
            await self._prober.verify(reader, peer, probe_region, timeout_s)
        except BaseException:
            self._tasks.spawn(self._disconnect(reader, peer), name=f"disconnect {info.transport}")
            raise
        return peer

    def doubt(self, session: Session) -> None:
        """A read has failed: prove the connection once more, without anybody waiting for it."""
        if session.lost is None and not session.doubted:
            session.doubted = True
            self._tasks.spawn(self._prove_again(session), name=f"prove {session.address}")

    async def _prove_again(self, session: Session) -> None:
        """If the data path is broken, the next hand-over shakes hands anew: the source may have opened its engine again."""
        sealed = unseal(session.source.exports[session.reader.name])
        try:
            timeout_s = self._config.connect_timeout_s
            await self._prober.verify(session.reader, session.peer, sealed.probe_region, timeout_s)
        except TransferFailed as error:
            session.lose(WorkerLost(f"its data path is broken: {error.message}"))
        session.doubted = False

    async def _disconnect(self, reader: Reader, peer: Peer) -> None:
        await reader.drained(peer)
        await asyncio.to_thread(peer.disconnect)

    def _open_reader(self, name: str) -> Reader:
        reader = Reader(name, self._opener, self._config, self._clock, self._extras)
        self._readers[name] = reader
        return reader

    def _lost(self, session: Session) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
            self.breaker(session.address).failed()
        self._num_late += session.num_late
        self._tasks.spawn(session.close(), name=f"close {session.address}")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            for reader in list(self._readers.values()):
                if reader.tick():
                    await self._fence(reader)
            for address in [address for address, breaker in self._breakers.items() if breaker.is_forgettable]:
                del self._breakers[address]

    async def _fence(self, reader: Reader) -> None:
        """R5: what cannot be proven by waiting is proven by destroying the transport. The next session opens it anew."""
        logger.error(
            "KV transport %s holds %d pages without proof for up to %.0f s: destroying it",
            reader.name,
            reader.quarantine.num_pages,
            reader.quarantine.oldest_s(self._clock.now()),
        )
        self._num_fences += 1
        del self._readers[reader.name]
        for session in [session for session in self._sessions.values() if session.reader is reader]:
            session.lose(WorkerLost(f"the {reader.name} transport is being opened anew"))
        try:
            async with asyncio.timeout(self._config.fence_timeout_s):
                await reader.destroy()
        except TimeoutError:
            # Nothing is left that could prove those pages: a restart can, and our owner is told to.
            raise InvariantError(
                f"the {reader.name} transport could not be destroyed within {self._config.fence_timeout_s:g} s"
            ) from None
        self._fenced |= {
            f"{name}_{reader.name}": self._fenced.get(f"{name}_{reader.name}", 0.0) + value
            for name, value in reader.counters.snapshot().items()
        }
        assert not len(reader.quarantine), "destroying a transport is the proof for all it posted"


def is_peer_failure(error: BaseException, session: Session | None) -> bool:
    """True if an error of a pull says that the peer itself is in trouble and nobody has counted that yet."""
    if session is None or session.lost is not None:
        return False
    return isinstance(error, WorkerLost | TransferFailed)


def is_answer(error: BaseException) -> bool:
    """True if an error of a pull is something that only a healthy peer can say."""
    return isinstance(error, TandemError) and not isinstance(
        error, WorkerLost | TransferFailed | Aborted | DeadlineExceeded
    )
