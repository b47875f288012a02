import pytest

from core.clock import ManualClock
from core.ids import Incarnation
from core.lifecycle import Lifecycle, State
from core.metrics import Metrics
from core.worker import Role
from gateway.admin import GatewayAdmin
from gateway.admission import Admission, Limits
from gateway.directory import Directory
from gateway.leases import Leases
from gateway.links import Links
from gateway.metrics import GatewayMetrics
from gateway.prefix_index import PrefixIndex
from gateway.worker_gauges import WorkerGauges
from gateway.worker_link import LinkRules
from tests.fakes.cluster import load, registration
from tests.fakes.sim_decode import LocalOpener


class Rig:
    def __init__(self):
        self.clock = ManualClock()
        self.lifecycle = Lifecycle()
        self.directory = Directory(self.clock)
        self.metrics = Metrics()
        self.drained = []
        self.leases = Leases(self.clock)
        self.admin = GatewayAdmin(
            name="gateway-1",
            incarnation=Incarnation("g"),
            lifecycle=self.lifecycle,
            directory=self.directory,
            index=PrefixIndex(),
            links=Links(
                gateway=Incarnation("g"), opener=LocalOpener(), clock=self.clock, rules=LinkRules(), silence_s=3.0
            ),
            admission=Admission(self.clock, Limits()),
            metrics=GatewayMetrics(self.metrics),
            clock=self.clock,
            drain=self.drained.append,
            stall_s=10.0,
            leases=self.leases,
            gauges=WorkerGauges(self.metrics),
        )

    def join(self, name, role):
        member, _ = self.directory.join(registration(name, role))
        self.directory.heartbeat(member, load(running_requests=2))
        return member


@pytest.fixture
def rig():
    return Rig()


async def test_readiness_is_the_gateways_own_and_liveness_its_loops(rig):
    assert rig.admin.started() and rig.admin.ready()
    rig.lifecycle.move(State.READY)
    assert (rig.admin.started(), rig.admin.ready(), rig.admin.live()) == ("", "", "")
    rig.lifecycle.move(State.DRAINING)
    assert "draining" in rig.admin.ready()
    rig.clock.advance(11)
    assert "11.0 s" in rig.admin.live()
    rig.admin.refresh()
    assert rig.admin.live() == ""


async def test_the_status_page_shows_every_worker_and_whether_it_is_routable(rig):
    rig.join("p1", Role.PREFILL)
    lost = rig.join("d1", Role.DECODE)
    rig.directory.disconnected(lost)
    rig.admin.publish({"http_address": "h:1"})
    rig.admin.refresh()
    status = rig.admin.status()
    assert status["http_address"] == "h:1"
    assert {worker["id"]: (worker["role"], worker["routable"]) for worker in status["workers"]} == {
        "p1": ("prefill", True),
        "d1": ("decode", False),
    }


async def test_gauges_count_ready_and_registered_workers(rig):
    rig.join("p1", Role.PREFILL)
    rig.directory.disconnected(rig.join("d1", Role.DECODE))
    rig.admin.refresh()
    text = rig.metrics.render().decode()
    assert 'tandem_gateway_workers_ready{role="prefill"} 1.0' in text
    assert 'tandem_gateway_workers_ready{role="decode"} 0.0' in text
    assert 'tandem_gateway_workers_registered{role="decode"} 1.0' in text


async def test_an_audit_finds_work_that_belongs_to_no_request(rig):
    member = rig.join("d1", Role.DECODE)
    assert (await rig.admin.statistics(audit=True)).audit_findings == ()
    rig.directory.fleet.own_requests[member.slot] = 1
    assert "none is in flight" in (await rig.admin.statistics(audit=True)).audit_findings[0]
    rig.directory.fleet.own_requests[member.slot] = -1
    assert "given back twice" in (await rig.admin.statistics(audit=True)).audit_findings[-1]


async def test_operators_can_describe_and_drain(rig):
    description = await rig.admin.describe()
    assert (description.name, description.kind, description.state) == ("gateway-1", "gateway", State.STARTING)
    assert await rig.admin.drain(5.0) is State.DRAINING
    assert rig.drained == [5.0]
