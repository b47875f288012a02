"""The unary adapters (admin, KV index) over a real loopback server."""

import asyncio

import pytest

from core.errors import BadRequest, ConfigError, DeadlineExceeded, NamespaceMismatch, WorkerLost
from core.ids import Incarnation
from core.lifecycle import State
from core.rpc.admin import AdminClient, Description, Statistics, add_admin
from core.rpc.kv_index import KvIndexClient, add_kv_index
from core.worker import KvSnapshot
from tests.fakes.rpc import a_proof, serving

DESCRIPTION = Description(
    name="decode-0",
    incarnation=Incarnation("d" * 32),
    kind="decode",
    state=State.READY,
    facts={"model": "scripted", "pages": 64, "transports": ["shm", "tcp"], "ü": None},
)


class FakeAdmin:
    def __init__(self):
        self.budgets = []
        self.audits = []
        self.hang = False

    async def describe(self):
        if self.hang:
            await asyncio.Event().wait()
        return DESCRIPTION

    async def drain(self, budget_s):
        self.budgets.append(budget_s)
        return State.DRAINING

    async def statistics(self, audit):
        self.audits.append(audit)
        return Statistics(values={"pages_free": 12.0}, audit_findings=("page 3 is in two states",) if audit else ())


class FakeIndex:
    async def snapshot(self):
        return KvSnapshot(incarnation=Incarnation("d" * 32), sequence=2**40, hashes=(-(2**63), 0, 2**63 - 1))


async def test_a_process_describes_itself():
    async with serving(lambda server: add_admin(server, FakeAdmin())) as address:
        assert await AdminClient(a_proof()).describe(address) == DESCRIPTION


async def test_drain_carries_its_budget_and_returns_the_state():
    admin = FakeAdmin()
    async with serving(lambda server: add_admin(server, admin)) as address:
        assert await AdminClient(a_proof()).drain(address, 2.5) is State.DRAINING
        with pytest.raises(BadRequest, match="budget"):
            await AdminClient(a_proof()).drain(address, -1)
        with pytest.raises(BadRequest, match="budget"):
            await AdminClient(a_proof()).drain(address, float("nan"))
    assert admin.budgets == [2.5]


async def test_statistics_bring_findings_only_when_asked():
    admin = FakeAdmin()
    async with serving(lambda server: add_admin(server, admin)) as address:
        client = AdminClient(a_proof())
        assert await client.statistics(address) == Statistics(values={"pages_free": 12.0})
        assert (await client.statistics(address, audit=True)).audit_findings == ("page 3 is in two states",)
    assert admin.audits == [False, True]


async def test_a_process_that_hangs_costs_the_deadline():
    admin = FakeAdmin()
    admin.hang = True
    async with serving(lambda server: add_admin(server, admin)) as address:
        with pytest.raises(DeadlineExceeded):
            await AdminClient(a_proof()).describe(address, timeout_s=0.2)


async def test_operators_without_the_secret_are_refused():
    admin = FakeAdmin()
    async with serving(lambda server: add_admin(server, admin)) as address:
        with pytest.raises(ConfigError, match="secret"):
            await AdminClient(a_proof(secret=b"another secret")).drain(address, 1.0)
    assert admin.budgets == []


async def test_a_process_that_does_not_serve_the_call_says_so():
    async with serving(lambda server: add_admin(server, FakeAdmin())) as address:
        with pytest.raises(NamespaceMismatch, match="does not serve"):
            await KvIndexClient(a_proof()).snapshot(address)


async def test_a_process_that_is_gone_is_a_lost_worker():
    async with serving(lambda server: add_admin(server, FakeAdmin())) as address:
        pass
    with pytest.raises(WorkerLost):
        await AdminClient(a_proof()).describe(address)


async def test_a_snapshot_arrives_whole():
    async with serving(lambda server: add_kv_index(server, FakeIndex())) as address:
        assert await KvIndexClient(a_proof()).snapshot(address) == await FakeIndex().snapshot()
