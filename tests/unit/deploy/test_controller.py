"""The controller: sums, rates, victims, one writer, drain before remove; over the fake actuator and a manual clock."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.errors import ConfigError
from core.metrics import Metrics
from deploy.actuators.api import Instance
from deploy.actuators.fake import FakeActuator
from deploy.autoscale.needs import needs_of
from deploy.autoscale.signals import Rules
from deploy.cluster_description import ClusterDescription
from deploy.controller.figures import GatewayFigures, WorkerFacts, workers_of
from deploy.controller.journal import Journal, replay
from deploy.controller.lock import FileLock
from deploy.controller.loop import Controller
from deploy.controller.meter import Meter, signals_of
from deploy.controller.metrics import ScalerMetrics
from deploy.controller.victim import choose_victim


def figures(incarnation="g1", *, workers=None, **own):
    values = {f"scale/{name}": float(value) for name, value in own.items()}
    for worker_id, facts in (workers or {}).items():
        values |= {f"worker/{worker_id}/{fact}": float(value) for fact, value in facts.items()}
    return GatewayFigures(incarnation=incarnation, values=values)


class ScriptedSource:
    def __init__(self):
        self.gateways, self.age_s = [], 0.0

    async def read(self):
        return self.gateways, self.age_s


class Rig:
    def __init__(self, tmp_path, *, advisory=False, fence=1, actuator=None, rules=None):
        self.clock = ManualClock(1000.0)
        self.actuator = actuator or FakeActuator(ClusterDescription())
        self.source = ScriptedSource()
        self.registry = CollectorRegistry()
        self.journal = tmp_path / "decisions.jsonl"
        self.controller = Controller(
            actuator=self.actuator,
            source=self.source,
            rules=rules or Rules(prefill_down_window_s=20, decode_down_window_s=20),
            clock=self.clock,
            fence=fence,
            advisory=advisory,
            journal=Journal(self.journal),
            metrics=ScalerMetrics(Metrics(self.registry)),
        )

    async def tick(self, seconds=5.0):
        self.clock.advance(seconds)
        decision = await self.controller.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return decision

    async def ids(self, role):
        return [i.id for i in await self.actuator.list() if i.role == role]


def pool_of(ids, **facts):
    return {i: {"is_prefill": i.startswith("prefill"), "is_ready": 1, "kv_tokens": 1000, **facts} for i in ids}


async def test_a_load_step_grows_prefill_and_its_end_drains_the_least_loaded_first(tmp_path):
    rig = Rig(tmp_path)
    await rig.actuator.ensure("prefill", 1, fence=1)
    await rig.actuator.ensure("decode", 1, fence=1)
    total = 0
    for _ in range(8):
        total += 12_000  # 2,400 uncached tokens a second
        workers = pool_of([*await rig.ids("prefill"), *await rig.ids("decode")])
        rig.source.gateways = [figures(prompt_tokens_total=total, ended_samples_total=total / 100, workers=workers)]
        await rig.tick()
    assert len(await rig.ids("prefill")) == 3
    for _ in range(30):
        workers = pool_of([*await rig.ids("prefill"), *await rig.ids("decode")])
        for worker_id in workers:
            workers[worker_id]["kv_live_tokens"] = 0 if worker_id == "prefill-2" else 5
        rig.source.gateways = [figures(prompt_tokens_total=total, ended_samples_total=total / 100, workers=workers)]
        await rig.tick()
    assert await rig.ids("prefill") == ["prefill-1"] or await rig.ids("prefill") == ["prefill-3"]
    assert rig.actuator.removed[0] == "prefill-2"
    assert len(await rig.ids("decode")) == 1


async def test_every_decision_is_decided_again_from_the_journal(tmp_path):
    rig = Rig(tmp_path)
    for n in range(6):
        rig.source.gateways = [figures(prompt_tokens_total=n * 9000, ended_samples_total=n, in_flight_samples=3)]
        await rig.tick()
    pairs = replay(rig.journal)
    assert len(pairs) == 6
    assert all(written == again for written, again in pairs)


async def test_advice_changes_nothing(tmp_path):
    rig = Rig(tmp_path, advisory=True)
    rig.source.gateways = [figures(workers=pool_of(["decode-9"], kv_live_tokens=1e6))]
    decision = await rig.tick()
    assert decision.decode.target > 0
    assert await rig.actuator.list() == ()
    assert rig.journal.exists()


async def test_stale_figures_never_shrink(tmp_path):
    rig = Rig(tmp_path)
    await rig.actuator.ensure("decode", 4, fence=1)
    rig.source.age_s = 100.0
    for _ in range(20):
        await rig.tick()
    assert len(await rig.ids("decode")) == 4


async def test_a_replaced_controller_stops_acting_and_ends(tmp_path):
    actuator = FakeActuator(ClusterDescription())
    old = Rig(tmp_path, fence=1, actuator=actuator)
    await actuator.ensure("decode", 1, fence=2)
    old.source.gateways = [figures(workers=pool_of(["decode-1"], kv_live_tokens=1e6))]
    await old.tick()
    await old.tick()
    assert old.controller.replaced is not None
    assert [i.id for i in await actuator.list() if i.role == "decode"] == ["decode-1"]
    with pytest.raises(type(old.controller.replaced)):
        await old.controller.run(0.0)


async def test_a_place_that_refuses_is_asked_again_at_the_next_tick(tmp_path):
    class Refusing(FakeActuator):
        refusals = 2

        async def ensure(self, role, count, *, fence):
            if self.refusals:
                self.refusals -= 1
                raise ConfigError("no room")
            await super().ensure(role, count, fence=fence)

    rig = Rig(tmp_path, actuator=Refusing(ClusterDescription()))
    await rig.tick()
    await rig.tick()
    assert {i.role for i in await rig.actuator.list()} == {"decode", "prefill"}
    assert rig.registry.get_sample_value("tandem_scaler_errors_total") == 2


def test_two_controllers_cannot_hold_one_lock_and_the_fence_grows(tmp_path):
    first, second = FileLock(tmp_path), FileLock(tmp_path)
    fence = first.acquire()
    with pytest.raises(ConfigError, match="another controller"):
        second.acquire()
    first.release()
    assert second.acquire() > fence
    second.release()


def test_workers_are_counted_once_by_their_youngest_report():
    old = figures("a", workers={"decode-1": {"age_s": 2.0, "kv_live_tokens": 1}})
    young = figures("b", workers={"decode-1": {"age_s": 0.1, "kv_live_tokens": 7}})
    for order in ([old, young], [young, old]):
        assert workers_of(order)["decode-1"].get("kv_live_tokens") == 7


def test_a_restarted_or_new_gateway_adds_no_false_rate():
    meter = Meter().add(0.0, [figures("a", prompt_tokens_total=5000), figures("b", prompt_tokens_total=100)])
    meter = meter.add(10.0, [figures("a2", prompt_tokens_total=10), figures("b", prompt_tokens_total=300)])
    assert meter.rate("prompt_tokens_total") == pytest.approx(20.0)


def told(meter, at, *, ended, output, open_requests, **facts):
    workers = {"decode-1": {"is_ready": 1, "rows": 4, **facts}}
    gateways = [
        figures(
            "a", workers=workers, ended_samples_total=ended, output_tokens_total=output, in_flight_samples=open_requests
        )
    ]
    meter = meter.add(at, gateways)
    return meter, signals_of(meter, gateways, [], now=at, age_s=0.0)


def test_what_is_asked_of_a_full_pool_is_told_by_arrivals_and_not_by_its_output():
    meter, _ = told(Meter(), 0.0, ended=0, output=0, open_requests=0)
    _, seen = told(meter, 10.0, ended=20, output=1000, open_requests=40)
    assert seen.output_tokens_per_s == pytest.approx(300.0)
    meter, _ = told(Meter(), 0.0, ended=0, output=0, open_requests=40)
    _, seen = told(meter, 10.0, ended=20, output=1000, open_requests=20)
    assert seen.output_tokens_per_s == pytest.approx(100.0), "a queue that empties asks for no less than is put out"


def test_requests_that_wait_behind_rows_in_prefill_are_no_reason_for_more_decode_workers():
    held = {"waiting_requests": 8, "rows_used": 4}
    assert told(Meter(), 0.0, ended=0, output=0, open_requests=0, running_requests=4, **held)[1].decode_requests == 12
    assert told(Meter(), 0.0, ended=0, output=0, open_requests=0, running_requests=0, **held)[1].decode_requests == 0


def test_kv_that_waits_for_the_link_is_told_with_the_rate_at_which_it_lands():
    idle = {"ended": 0, "output": 0, "open_requests": 0}
    _, seen = told(Meter(), 0.0, **idle, kv_backlog_bytes=8e6, kv_bytes_per_s=2e6)
    assert (seen.kv_backlog_bytes, seen.kv_bytes_per_s) == (8e6, 2e6)
    assert needs_of(Rules(), seen).network_bound, "four seconds of KV wait"
    _, seen = told(Meter(), 0.0, **idle, kv_backlog_bytes=8e6)
    assert not needs_of(Rules(), seen).network_bound, "nothing has landed yet, so no rate is known"


def test_what_is_draining_or_held_serves_nobody():
    instances = [
        Instance(id="decode-1", role="decode", state="ready"),
        Instance(id="decode-2", role="decode", state="draining"),
        Instance(id="decode-3", role="decode", state="starting"),
        Instance(id="decode-4", role="decode", state="held"),
    ]
    gateways = [figures(workers=pool_of(["decode-1", "decode-2"]))]
    count = signals_of(Meter(), gateways, instances, now=0.0, age_s=0.0).decode
    assert (count.ready, count.starting, count.draining) == (1, 1, 1)


def worker(name, **facts):
    return WorkerFacts(id=name, facts={key: float(value) for key, value in facts.items()})


def test_the_victim_holds_least_and_is_not_the_last_of_its_domain():
    pool = [
        Instance(id=f"decode-{n}", role="decode", state="ready", domain=d) for n, d in ((1, "a"), (2, "a"), (3, "b"))
    ]
    workers = {
        "decode-1": worker("decode-1", kv_live_tokens=50),
        "decode-2": worker("decode-2", kv_live_tokens=50, cached_tokens=9),
        "decode-3": worker("decode-3", kv_live_tokens=0),
    }
    assert choose_victim("decode", pool, workers) == "decode-1"
    del workers["decode-1"]
    assert choose_victim("decode", pool, workers) == "decode-2", "silence is no proof of idleness"
    assert choose_victim("decode", pool[:1], workers) is None


async def test_a_place_that_cannot_be_asked_does_not_end_the_controller(tmp_path):
    """A restart of an orchestrator's API server is a pause, not a reason to leave."""
    rig = Rig(tmp_path)
    asked = []

    async def unreachable():
        asked.append(1)
        raise ConfigError("the API server does not answer")

    rig.actuator.list = unreachable
    running = asyncio.create_task(rig.controller.run(0.0))
    async with asyncio.timeout(30):
        while len(asked) < 3:  # noqa: ASYNC110 - the condition is on another task's state
            await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    assert rig.registry.get_sample_value("tandem_scaler_errors_total") >= 2
