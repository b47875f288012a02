"""Worker's half of membership: one stream to every gateway process, kept up for the worker's whole life.

Registers, sends a heartbeat with the current load every second, pushes KV events in order, reconnects with
back-off, finds sibling processes, and leaves with acknowledgement. Routing and readiness are decided elsewhere.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from core.aio import OnCrash, Tasks
from core.clock import Clock
from core.errors import NoCapacity, TandemError, WorkerLost, from_code
from core.rpc.addresses import is_name, look_up
from core.rpc.channel import connect
from core.rpc.convert.request import load_to_proto
from core.rpc.convert.worker import events_to_proto, registration_to_proto
from core.rpc.duplex import Duplex
from core.rpc.membership import Welcome, welcome_from_proto
from core.rpc.proof import Proof
from core.worker import KvEventBatch, Load, Registration
from tandem.v1 import membership_pb2 as pb
from tandem.v1 import membership_pb2_grpc

logger = logging.getLogger(__name__)

MAX_GATEWAYS = 256
"""Bound on addresses learned from lists of siblings."""
OUTBOX_REPORTS = 1024


class MembershipTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. The TTL is the gateway's and comes with its welcome."""

    heartbeat_s: float = 1.0
    connect_s: float = 1.0
    register_s: float = 3.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 2.0
    look_up_s: float = 2.0
    """How often names of gateways are looked up: gateways come and go behind one."""


class MembershipClient:
    """All gateway streams of one worker. Asyncio thread."""

    def __init__(
        self,
        *,
        proof: Proof,
        registration: Registration,
        load: Callable[[], Load],
        addresses: Sequence[str],
        clock: Clock,
        times: MembershipTimes | None = None,
        rng: random.Random | None = None,
        on_crash: OnCrash | None = None,
    ) -> None:
        self._proof = proof
        self._registration = registration
        self._load = load
        self._configured = tuple(dict.fromkeys(a for a in addresses if not is_name(a)))
        self._names = tuple(dict.fromkeys(filter(is_name, addresses)))
        self._clock = clock
        self._times = times or MembershipTimes()
        self._rng = rng or random.Random()  # noqa: S311 - jitter, no secret
        self._links: dict[str, _GatewayLink] = {}
        self._tasks = Tasks(on_crash)
        self._is_leaving = False

    def start(self) -> None:
        """Begin to join every configured gateway process; returns at once."""
        for address in self._configured:
            self._add(address)
        for name in self._names:
            self._tasks.spawn(self._follow_name(name), name=f"gateways of {name}")

    def publish(self, batch: KvEventBatch) -> None:
        """Push KV events to all registered gateways, in call order.

        A gateway that is away or does not read misses the batch, sees the gap in `sequence` and takes a snapshot.
        """
        report = pb.WorkerReport(kv_events=events_to_proto(batch))
        for link in self._links.values():
            link.post(report)

    def report_load(self) -> None:
        """Send the current load now, beside the periodic heartbeats: for changes that routing should see at once."""
        report = self._heartbeat()
        for link in self._links.values():
            link.post(report)

    @property
    def holds_lease(self) -> bool:
        """True if some gateway answered within its TTL: the worker may call itself ready."""
        now = self._clock.now()
        return any(
            link.welcome is not None and now - link.last_seen <= link.welcome.ttl_s for link in self._links.values()
        )

    @property
    def gateways(self) -> Mapping[str, Welcome | None]:
        """Each known membership address with the gateway's welcome, None while it is not registered there."""
        return {address: link.welcome for address, link in self._links.items()}

    @property
    def refusals(self) -> Mapping[str, TandemError]:
        """Addresses whose gateway refuses this worker, with its reason; a later success clears it."""
        return {address: link.refusal for address, link in self._links.items() if link.refusal is not None}

    async def leave(self, reason: str, timeout_s: float = 3.0) -> bool:
        """Deregister everywhere and wait for the acknowledgements, at most `timeout_s` (one TTL).

        True if every registered gateway acknowledged. Nothing is joined again afterwards.
        """
        self._is_leaving = True
        registered = [link for link in self._links.values() if link.welcome is not None]
        report = pb.WorkerReport(deregister=pb.Deregister(reason=reason))
        for link in registered:
            link.post(report)
        try:
            async with asyncio.timeout(timeout_s):
                for link in registered:
                    await link.ended.wait()
        except TimeoutError:
            logger.warning("left after %s s without every gateway's acknowledgement", timeout_s)
        return all(link.is_acknowledged for link in registered)

    async def close(self) -> None:
        """Drop all streams without a goodbye; idempotent. Call `leave` first for an orderly end."""
        self._is_leaving = True
        await self._tasks.close()

    async def _follow_name(self, name: str) -> None:
        while not self._is_leaving:
            for address in await look_up(name):
                self._add(address)
            await asyncio.sleep(self._times.look_up_s)

    def _add(self, address: str) -> None:
        if self._is_leaving or address in self._links or len(self._links) >= MAX_GATEWAYS:
            return
        link = _GatewayLink(address, self._proof, self._registration, self._clock, self._times)
        self._links[address] = link
        self._tasks.spawn(self._keep(link), name=f"membership at {address}")

    async def _keep(self, link: "_GatewayLink") -> None:
        delay = self._times.backoff_first_s
        while not self._is_leaving:
            started = self._clock.now()
            try:
                await link.session(self._heartbeat, self._welcomed)
            except TandemError as error:
                link.log_end(error)
            if self._is_leaving:
                return
            if link.last_seen >= started:
                delay = self._times.backoff_first_s
            elif self._is_forgotten(link):
                del self._links[link.address]
                return
            await asyncio.sleep(delay * self._rng.uniform(0.5, 1.0))
            delay = min(2 * delay, self._times.backoff_max_s)

    def _heartbeat(self) -> pb.WorkerReport:
        return pb.WorkerReport(heartbeat=pb.HeartbeatReport(load=load_to_proto(self._load())))

    def _welcomed(self, link: "_GatewayLink", welcome: Welcome) -> bool:
        """Take in a gateway's answer; False if we are leaving, or another address leads to that very process."""
        if self._is_leaving:
            return False
        for other in self._links.values():
            if other is not link and other.welcome is not None and other.welcome.gateway == welcome.gateway:
                return False
        for address in welcome.siblings:
            self._add(address)
        return True

    def _is_forgotten(self, link: "_GatewayLink") -> bool:
        # A sibling that no live gateway lists is gone for good; a configured address never is.
        if link.address in self._configured:
            return False
        welcomes = [other.welcome for other in self._links.values() if other.welcome is not None]
        return bool(welcomes) and all(link.address not in welcome.siblings for welcome in welcomes)


class _GatewayLink:
    """One membership address: at most one stream at a time."""

    def __init__(
        self, address: str, proof: Proof, registration: Registration, clock: Clock, times: MembershipTimes
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        """Set while registered."""
        self.last_seen = float("-inf")
        self.refusal: TandemError | None = None
        self.is_acknowledged = False
        self.ended = asyncio.Event()
        """Set while no stream is registered."""
        self._proof = proof
        self._registration = registration
        self._clock = clock
        self._times = times
        self._duplex: Duplex[pb.WorkerReport, pb.GatewayReply] | None = None
        self._last_logged = ""

    def post(self, report: pb.WorkerReport) -> None:
        """Queue a report if a stream is open; one that finds no room is lost, which receivers are made for.

        A report may go out before the welcome came in: the gateway reads it after the registration, and a snapshot
        that it takes meanwhile leaves no gap.
        """
        if self._duplex is None:
            return
        try:
            self._duplex.post(report)
        except (WorkerLost, NoCapacity):
            logger.debug("a report to %s is lost", self.address)

    async def session(
        self, heartbeat: Callable[[], pb.WorkerReport], welcomed: Callable[["_GatewayLink", Welcome], bool]
    ) -> None:
        """Join and stay until the stream ends; raises why. Returns if the gateway is already joined, or after leaving."""
        channel = await connect(self.address, self._times.connect_s, self._proof.tls)
        call = membership_pb2_grpc.MembershipStub(channel).Join(metadata=self._proof.metadata)
        duplex = Duplex(channel, call, f"gateway {self.address}", OUTBOX_REPORTS)
        try:
            duplex.post(pb.WorkerReport(register=registration_to_proto(self._registration)))
            self._duplex = duplex
            welcome = await self._read_welcome(duplex)
            if not welcomed(self, welcome):
                return
            self._begin(welcome)
            await self._follow(duplex, welcome.ttl_s, heartbeat)
        finally:
            self._duplex, self.welcome = None, None
            self.ended.set()
            await duplex.close(flush_s=0)

    def _begin(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.last_seen = self._clock.now()
        self.refusal = None
        self.ended.clear()
        self._last_logged = ""
        logger.info("registered at gateway %s, incarnation %s", self.address, welcome.gateway)

    async def _read_welcome(self, duplex: Duplex[pb.WorkerReport, pb.GatewayReply]) -> Welcome:
        try:
            async with asyncio.timeout(self._times.register_s):
                reply = await duplex.read()
        except TimeoutError as error:
            raise WorkerLost(f"gateway {self.address} did not answer the registration") from error
        match reply.WhichOneof("body"):
            case "registered":
                return welcome_from_proto(reply.registered)
            case "refused":
                error = reply.refused.error
                self.refusal = from_code(error.code, error.message)
                raise self.refusal
            case _:
                raise WorkerLost(f"gateway {self.address} answered the registration with something else")

    async def _follow(
        self,
        duplex: Duplex[pb.WorkerReport, pb.GatewayReply],
        ttl_s: float,
        heartbeat: Callable[[], pb.WorkerReport],
    ) -> None:
        beating = asyncio.get_running_loop().create_task(self._beat(heartbeat), name=f"heartbeat to {self.address}")
        try:
            while True:
                async with asyncio.timeout(ttl_s):
                    reply = await duplex.read()
                self.last_seen = self._clock.now()
                if reply.WhichOneof("body") == "deregister":
                    self.is_acknowledged = True
                    return
        except TimeoutError as error:
            raise WorkerLost(f"gateway {self.address} is silent for {ttl_s:g} s") from error
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            if not beating.cancelled() and (bug := beating.exception()) is not None:
                raise bug  # the gateway heard nothing because of us

    async def _beat(self, heartbeat: Callable[[], pb.WorkerReport]) -> None:
        while True:
            self.post(heartbeat())
            await asyncio.sleep(self._times.heartbeat_s)

    def log_end(self, error: TandemError) -> None:
        """Log why a session ended, once per reason: reconnecting for an hour is one line, not thousands."""
        if error.message != self._last_logged:
            self._last_logged = error.message
            logger.warning("not registered at gateway %s: %s", self.address, error.message)
