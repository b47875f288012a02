"""What surrounds a worker: probes, registration, ready file, leaving. The body is a fake, everything else is real."""

import asyncio
import http.client
import json
from contextlib import AsyncExitStack

import pytest

from core.clock import SystemClock
from core.errors import ConfigError
from core.exported import Exported, ExportedStatistics
from core.lifecycle import State
from core.metrics import Metrics
from core.process import Departure
from core.rpc.admin import AdminClient, Statistics
from core.rpc.membership import add_membership
from core.rpc.server import RpcServer
from core.worker import KvEvent, KvEventBatch, KvSnapshot
from core.worker_config import WorkerSection
from core.worker_shell import WorkerShell
from tests.fakes.rpc import RecordingMembership, a_load, a_proof, a_registration, serving


class FakeBody:
    def __init__(self) -> None:
        self.age_s = 0.0
        self.crash = None
        self.calls = []
        self.idle = asyncio.Event()
        self.idle.set()

    async def load(self):
        if self.crash is not None:
            raise self.crash
        return a_load(pages_free=42)

    async def statistics(self, audit):
        return Statistics(values={"pages": 42.0}, audit_findings=("a page is lost",) if audit else ())

    async def snapshot(self):
        return KvSnapshot(incarnation="d" * 32, sequence=0, hashes=())

    def heartbeat_age_s(self):
        return self.age_s

    def begin_drain(self):
        self.calls.append("begin_drain")

    async def finished(self):
        await self.idle.wait()
        self.calls.append("finished")

    async def hand_back(self):
        self.calls.append("hand_back")


class Rig:
    """A shell whose `serve` runs as a task."""

    def __init__(self, directory, gateways=(), **section) -> None:
        self.section = WorkerSection(id="w-1", gateways=tuple(gateways), run_dir=str(directory), stall_s=5.0, **section)
        self.ready_file = directory / "w-1.json"
        self.proof = a_proof("d" * 32)
        self.departure = Departure(SystemClock(), 20.0)
        self.body = FakeBody()
        metrics = Metrics()
        self.exported = ExportedStatistics(metrics, (Exported("pages", "tandem_pages_all", "Pages."),))
        self.shell = WorkerShell(
            section=self.section,
            kind="decode",
            proof=self.proof,
            metrics=metrics,
            departure=self.departure,
            clock=SystemClock(),
        )
        self.task = None

    async def run(self, *, prepare=None):
        async with AsyncExitStack() as stack:
            self.shell.open_listener(stack)
            self.shell.enter(State.LOADING)
            if prepare is not None:
                await prepare
            await self.shell.serve(
                stack, RpcServer(self.proof), self.body, register=self.register, exported=self.exported
            )

    def register(self, address, http_address):
        return a_registration(
            worker_id="w-1",
            incarnation=self.proof.incarnation,
            secret_check=self.proof.check_value(),
            address=address,
            http_address=http_address,
        )

    async def start(self):
        self.task = asyncio.create_task(self.run())
        while not self.ready_file.exists():
            assert not self.task.done(), self.task.exception()
            await asyncio.sleep(0.01)
        return json.loads(self.ready_file.read_text())

    async def get(self, path, method="GET"):
        def ask():
            host, port = self.shell.http_address.rsplit(":", 1)
            connection = http.client.HTTPConnection(host, int(port), timeout=30)
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read().decode()
            connection.close()
            return response.status, body

        return await asyncio.to_thread(ask)

    async def until(self, path, status, timeout_s=5):
        end = asyncio.get_running_loop().time() + timeout_s
        while True:
            found, text = await self.get(path)
            if found == status:
                return text
            assert asyncio.get_running_loop().time() < end, f"{path} stays {found}: {text}"
            await asyncio.sleep(0.02)

    async def leave(self, budget_s=None):
        self.departure.begin(budget_s)
        async with asyncio.timeout(30):
            await self.task


async def test_probes_follow_the_life_of_the_process(tmp_path):
    rig = Rig(tmp_path)
    loading = asyncio.Event()
    rig.task = asyncio.create_task(rig.run(prepare=loading.wait()))
    await asyncio.sleep(0)
    assert [(await rig.get(path))[0] for path in ("/livez", "/startz", "/readyz")] == [200, 503, 503]
    loading.set()
    await rig.until("/readyz", 200)
    assert (await rig.get("/startz"))[0] == 200
    assert "tandem_pages_all 42.0" in (await rig.get("/metrics"))[1]
    status = json.loads((await rig.get("/statusz"))[1])
    assert (status["state"], status["load"]["pages_free"]) == ("ready", 42)
    rig.body.age_s = 99.0
    assert "no progress for 99.0 s" in (await rig.get("/livez"))[1]
    await rig.leave()


async def test_a_worker_is_ready_once_a_gateway_knows_it_and_says_goodbye(tmp_path):
    membership = RecordingMembership()
    async with serving(lambda server: add_membership(server, membership)) as address:
        rig = Rig(tmp_path, [address])
        facts = await rig.start()
        await rig.until("/readyz", 200)
        assert membership.registrations[0].address == facts["address"]
        await membership.until("heartbeat", 2)
        assert membership.loads[-1].pages_free == 42
        rig.shell.push_events(KvEventBatch(sequence=1, events=(KvEvent(kind="stored", hashes=(1,)),)))
        await membership.until("events")
        await rig.leave()
    assert membership.count("left: draining") == 1
    assert membership.loads[-1].state is State.DRAINING
    assert rig.body.calls == ["begin_drain", "finished"]
    assert not rig.ready_file.exists()


async def test_without_a_gateway_that_answers_the_worker_is_not_ready(tmp_path):
    rig = Rig(tmp_path, ["127.0.0.1:1"])
    await rig.start()
    assert "no gateway" in await rig.until("/readyz", 503)
    await rig.leave()


async def test_work_that_outlives_the_budget_is_handed_back(tmp_path):
    rig = Rig(tmp_path)
    await rig.start()
    rig.body.idle.clear()
    await rig.leave(budget_s=0.05)
    assert rig.body.calls == ["begin_drain", "begin_drain", "hand_back"]


@pytest.mark.parametrize("how", ["http", "admin"])
async def test_operators_can_ask_a_worker_to_leave(tmp_path, how):
    rig = Rig(tmp_path)
    facts = await rig.start()
    if how == "http":
        assert (await rig.get("/drain", "POST"))[0] == 202
    else:
        admin = AdminClient(rig.proof)
        described = await admin.describe(facts["address"])
        assert (described.name, described.kind, described.state) == ("w-1", "decode", State.READY)
        assert (await admin.statistics(facts["address"], audit=True)).audit_findings == ("a page is lost",)
        assert await admin.drain(facts["address"], 5.0) is State.DRAINING
    async with asyncio.timeout(30):
        await rig.task
    assert rig.body.calls == ["begin_drain", "finished"]


async def test_an_engine_that_crashes_takes_the_process_down_without_a_drain(tmp_path):
    rig = Rig(tmp_path)
    await rig.start()
    rig.body.crash = RuntimeError("the engine has stopped")
    async with asyncio.timeout(30):
        await rig.task
    assert rig.departure.error is rig.body.crash
    assert rig.body.calls == []
    assert not rig.ready_file.exists()


async def test_a_taken_grpc_port_is_found_before_anything_is_loaded(tmp_path):
    rig = Rig(tmp_path)
    facts = await rig.start()
    port = int(facts["address"].rsplit(":", 1)[1])
    second = Rig(tmp_path, port=port)
    with pytest.raises(ConfigError, match=str(port)):
        await second.run()
    await rig.leave()


async def test_peers_are_told_the_advertised_address(tmp_path):
    rig = Rig(tmp_path, host="0.0.0.0", advertise_host="localhost")
    facts = await rig.start()
    assert facts["address"].startswith("localhost:")
    assert facts["http_address"].startswith("localhost:")
    await rig.leave()
