"""Worker -> gateway process: the served half of membership, with the vocabulary that both halves share.

Carries reports in order; whether a worker is alive, ready or routable is the directory's decision (by TTL).
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from grpc import aio

from core.aio import within
from core.errors import BadRequest, TandemError
from core.ids import Incarnation
from core.rpc.convert.request import error_to_proto, load_from_proto
from core.rpc.convert.worker import events_from_proto, registration_from_proto
from core.rpc.server import RpcServer, write
from core.worker import KvEventBatch, Load, Registration
from tandem.v1 import membership_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "tandem.v1.Membership"
REGISTER_TIMEOUT_S = 5.0

ServedContext = aio.ServicerContext[pb.WorkerReport, pb.GatewayReply]


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process's answer to a registration."""

    gateway: Incarnation
    siblings: tuple[str, ...] = ()
    """Membership addresses of the other processes of this gateway."""
    ttl_s: float = 3.0
    """Silence after which the gateway takes the worker for dead."""


class MembershipService(Protocol):
    """What a gateway process implements. Called on the asyncio thread, in the order of the stream; must not block."""

    def joined(self, registration: Registration) -> Welcome:
        """Take a worker in. Raises a `TandemError` to refuse it (the worker is told why).

        Called again for the same incarnation after a broken stream: events may then have been missed.
        """
        ...

    def heartbeat(self, incarnation: Incarnation, load: Load) -> None:
        """Take a load report, which also renews the worker's TTL."""
        ...

    def events(self, incarnation: Incarnation, batch: KvEventBatch) -> None:
        """Take one batch of KV events; `batch.sequence` shows gaps and repeats."""
        ...

    def left(self, incarnation: Incarnation, reason: str) -> None:
        """Forget the worker for new work: it is acknowledged as soon as this returns."""
        ...

    def lost(self, incarnation: Incarnation) -> None:
        """The last stream of that incarnation ended without a goodbye; it may come back within its TTL."""
        ...


def add_membership(server: RpcServer, service: MembershipService) -> None:
    """Serve `service` on `server`."""
    serve = _Membership(service)
    server.add_stream(SERVICE, "Join", serve.join, pb.WorkerReport.FromString)


class _Membership:
    """Runs the streams; a worker that reconnects may briefly have two."""

    def __init__(self, service: MembershipService) -> None:
        self._service = service
        self._streams: Counter[Incarnation] = Counter()

    async def join(self, reports: AsyncIterator[pb.WorkerReport], context: ServedContext) -> None:
        registration = await _first_report(reports)
        try:
            welcome = self._service.joined(registration)
        except TandemError as error:
            logger.warning("refused worker %s: %s", registration.worker_id, error.message)
            refusal = error_to_proto(error.code, error.message, error.retry_after_s or 0.0)
            await write(context, pb.GatewayReply(refused=pb.Refused(error=refusal)))
            return
        incarnation = registration.incarnation
        self._streams[incarnation] += 1
        has_left = False
        try:
            await write(context, _welcome_to_proto(welcome))
            has_left = await self._follow(incarnation, reports, context)
        finally:
            self._streams[incarnation] -= 1
            if self._streams[incarnation] <= 0:
                del self._streams[incarnation]
                if not has_left:
                    self._service.lost(incarnation)

    async def _follow(
        self, incarnation: Incarnation, reports: AsyncIterator[pb.WorkerReport], context: ServedContext
    ) -> bool:
        async for report in reports:
            match report.WhichOneof("body"):
                case "heartbeat":
                    self._service.heartbeat(incarnation, load_from_proto(report.heartbeat.load))
                    await write(context, pb.GatewayReply(heartbeat=pb.HeartbeatSeen()))
                case "kv_events":
                    self._service.events(incarnation, events_from_proto(report.kv_events))
                case "deregister":
                    self._service.left(incarnation, report.deregister.reason)
                    await write(context, pb.GatewayReply(deregister=pb.DeregisterSeen()))
                    return True
                case "register" | None:
                    raise BadRequest("the worker sent a report that does not belong here")
        return False


async def _first_report(reports: AsyncIterator[pb.WorkerReport]) -> Registration:
    async with within(REGISTER_TIMEOUT_S, "waiting for the registration"):
        try:
            first = await anext(reports)
        except StopAsyncIteration:
            raise BadRequest("the stream ended before its registration") from None
    if first.WhichOneof("body") != "register":
        raise BadRequest("the first report of a stream must be the registration")
    return registration_from_proto(first.register)


def _welcome_to_proto(welcome: Welcome) -> pb.GatewayReply:
    registered = pb.Registered(gateway_incarnation=welcome.gateway, siblings=welcome.siblings, ttl_s=welcome.ttl_s)
    return pb.GatewayReply(registered=registered)


def welcome_from_proto(message: pb.Registered) -> Welcome:
    """Decode a gateway's answer to a registration."""
    return Welcome(
        gateway=Incarnation(message.gateway_incarnation), siblings=tuple(message.siblings), ttl_s=message.ttl_s
    )
