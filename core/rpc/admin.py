"""Operators and the launcher <-> any process: describe, drain, statistics."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from core.errors import BadRequest
from core.ids import Incarnation
from core.lifecycle import State
from core.rpc.channel import one_call
from core.rpc.convert.request import state_from_text
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from tandem.v1 import admin_pb2 as pb
from tandem.v1 import admin_pb2_grpc

SERVICE = "tandem.v1.Admin"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is."""

    name: str
    incarnation: Incarnation
    kind: str
    """gateway | prefill | decode"""
    state: State
    facts: Mapping[str, Any] = {}
    """Static facts that JSON can hold: model, addresses, fingerprint in hex, capacity."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges by name, and what an audit found wrong (empty is healthy)."""

    values: Mapping[str, float] = {}
    audit_findings: tuple[str, ...] = ()


class AdminService(Protocol):
    """What every process implements. Asyncio thread."""

    async def describe(self) -> Description:
        """Say what this process is."""
        ...

    async def drain(self, budget_s: float) -> State:
        """Begin to leave and return at once with the new state; idempotent, a second call may shorten the budget."""
        ...

    async def statistics(self, audit: bool) -> Statistics:
        """Return counters; with `audit` run the full page audit."""
        ...


def add_admin(server: RpcServer, service: AdminService) -> None:
    """Serve `service` on `server`."""

    async def describe(_request: pb.DescribeRequest) -> pb.DescribeReply:
        description = await service.describe()
        return pb.DescribeReply(
            name=description.name,
            incarnation=description.incarnation,
            kind=description.kind,
            state=description.state.value,
            facts_json=msgspec.json.encode(description.facts).decode(),
        )

    async def drain(request: pb.DrainRequest) -> pb.DrainReply:
        if not 0 <= request.budget_s < float("inf"):
            raise BadRequest("the drain budget must be a number of seconds, 0 or more", param="budget_s")
        return pb.DrainReply(state=(await service.drain(request.budget_s)).value)

    async def statistics(request: pb.StatisticsRequest) -> pb.StatisticsReply:
        found = await service.statistics(request.audit)
        return pb.StatisticsReply(values=found.values, audit_findings=found.audit_findings)

    server.add_unary(SERVICE, "Describe", describe, pb.DescribeRequest.FromString)
    server.add_unary(SERVICE, "Drain", drain, pb.DrainRequest.FromString)
    server.add_unary(SERVICE, "Statistics", statistics, pb.StatisticsRequest.FromString)


class AdminClient:
    """Asks processes; one short connection per call. Raises `WorkerLost`, `DeadlineExceeded`, `ConfigError`."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    async def describe(self, address: str, timeout_s: float = 3.0) -> Description:
        """Ask what the process at `address` is."""
        async with one_call(address, timeout_s, self._proof.tls) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            reply = await stub.Describe(pb.DescribeRequest(), timeout=timeout_s, metadata=self._proof.metadata)
        return Description(
            name=reply.name,
            incarnation=Incarnation(reply.incarnation),
            kind=reply.kind,
            state=state_from_text(reply.state),
            facts=msgspec.json.decode(reply.facts_json, type=dict[str, Any]) if reply.facts_json else {},
        )

    async def drain(self, address: str, budget_s: float, timeout_s: float = 3.0) -> State:
        """Ask the process at `address` to leave within `budget_s`; returns once it has begun."""
        async with one_call(address, timeout_s, self._proof.tls) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            request = pb.DrainRequest(budget_s=budget_s)
            reply = await stub.Drain(request, timeout=timeout_s, metadata=self._proof.metadata)
        return state_from_text(reply.state)

    async def statistics(self, address: str, audit: bool = False, timeout_s: float = 10.0) -> Statistics:
        """Ask the process at `address` for its counters, and for an audit if asked."""
        async with one_call(address, timeout_s, self._proof.tls) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            request = pb.StatisticsRequest(audit=audit)
            reply = await stub.Statistics(request, timeout=timeout_s, metadata=self._proof.metadata)
        return Statistics(values=dict(reply.values), audit_findings=tuple(reply.audit_findings))
