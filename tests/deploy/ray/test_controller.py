"""The controller of a cluster on Ray, on a Ray that does what the test says."""

import asyncio
import contextlib
import json

import msgspec
import pytest

from core.config import load
from core.errors import ConfigError
from deploy.cluster_description import ClusterDescription, PoolPart
from deploy.local.restart import HOLD_AFTER_RESTARTS
from deploy.local.spec import ClusterSpec
from deploy.ray import launcher as launcher_module
from deploy.ray import process as process_module
from deploy.ray.controller import RayController
from deploy.ray.plan import Needs, RayPlan, choose_domain, decode_saved, missing_resources, plan_of, spec_on_hosts
from deploy.ray.supervisor import host_sets
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig
from tests.deploy.ray.fake_ray import FakeRay, Healthy

SPEC = ClusterSpec(name="t", model="scripted", prefill=1, decode=2, drain_s=0.2)
SPEC_ROLES = ("prefill", "decode")
PLAN = RayPlan(spec=SPEC, needs={})


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(process_module, "PING_S", 0.02)
    monkeypatch.setattr(launcher_module, "GRACE_S", 0.1)
    monkeypatch.setattr("deploy.local.restart.FIRST_DELAY_S", 0.01)
    with Healthy() as address:
        yield FakeRay(address)


class Cluster:
    def __init__(self, fake, plan, tmp_path):
        self.fake = fake
        self.lines = []
        self.body = RayController(plan, fake, tmp_path)

    async def ask(self, command, **more):
        return await self.body.handle({"command": command, **more}, self.lines.append)

    async def states(self):
        return {p["id"]: p["state"] for p in (await self.ask("status"))["processes"]}

    async def becomes(self, check):
        async with asyncio.timeout(30):
            while not check(await self.states()):  # noqa: ASYNC110 - the controller tells nobody
                await asyncio.sleep(0.01)

    async def frees(self, name):
        await self.becomes(lambda _: name not in self.body._launcher._taken)


@contextlib.asynccontextmanager
async def running(fake, tmp_path, plan=PLAN):
    cluster = Cluster(fake, plan, tmp_path)
    await cluster.ask("wait")
    try:
        yield cluster
    finally:
        await cluster.ask("down", budget_s=1.0)
    assert fake.supervisors == {}, "every supervisor is ended"
    assert fake.groups == set()
    assert fake.saved is None


def crash(cluster):
    """The controller's process is gone; what it had started lives on."""
    launcher = cluster.body._launcher
    tasks = [*launcher._waiting, *launcher._watchers, cluster.body._beginning]
    for slot in launcher._slots.values():
        slot.remote.close()
    for task in tasks:
        task.cancel()
    return asyncio.gather(*tasks, return_exceptions=True)


async def test_a_cluster_starts_gateway_first_and_ends_without_a_trace(fake, tmp_path):
    async with running(fake, tmp_path) as cluster:
        assert fake.created[0] == "gateway-1"
        assert sorted(fake.created[1:]) == ["decode-1", "decode-2", "prefill-1"]
        assert set((await cluster.states()).values()) == {"ready"}
        assert any(line.startswith("decode-2: ready after") for line in cluster.lines)


async def test_pools_scale_one_by_one_and_the_drained_worker_is_the_one_removed(fake, tmp_path):
    async with running(fake, tmp_path) as cluster:
        others = {n: s for n, s in fake.supervisors.items() if not n.startswith("prefill")}
        await cluster.ask("scale", pools={"prefill": 3})
        await cluster.ask("drain", worker="prefill-2")
        assert sorted(await cluster.states()) == ["decode-1", "decode-2", "gateway-1", "prefill-1", "prefill-3"]
        assert {n: s for n, s in fake.supervisors.items() if not n.startswith("prefill")} == others
        assert fake.ended == ["prefill-2"]


async def test_a_crashed_process_comes_back_under_its_name_and_holds_after_too_many(fake, tmp_path):
    async with running(fake, tmp_path) as cluster:
        for _ in range(HOLD_AFTER_RESTARTS):
            old = fake.supervisors["decode-1"]
            old.exits(1)
            await cluster.becomes(
                lambda s, old=old: fake.supervisors.get("decode-1", old) is not old and s["decode-1"] == "ready"
            )
        fake.supervisors["decode-1"].exits(1)
        await cluster.becomes(lambda s: s["decode-1"] == "held")
        assert "decode-2" in fake.supervisors


async def test_a_lost_supervisor_is_replaced_under_a_new_name_which_is_free_again_only_after_its_time(fake, tmp_path):
    async with running(fake, tmp_path) as cluster:
        fake.supervisors["decode-2"].dies()
        await cluster.becomes(lambda s: s.get("decode-3") == "ready")
        assert "decode-2" not in await cluster.states()
        await cluster.frees("decode-2")
        await cluster.ask("scale", pools={"decode": 3})
        assert fake.created[-2:] == ["decode-3", "decode-2"], "in this order"


async def test_a_silent_host_keeps_its_name_and_its_worker_must_leave_when_it_comes_back(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "SILENCE_S", 0.1)
    async with running(fake, tmp_path) as cluster:
        silent = fake.supervisors["decode-1"]
        silent.is_silent = True
        await cluster.becomes(lambda s: s.get("decode-3") == "ready")
        await cluster.ask("scale", pools={"decode": 3})
        assert "decode-4" in fake.created, "decode-1 may still run"
        silent.is_silent = False
        await cluster.frees("decode-1")
        assert silent.asked
        assert "decode-1" not in fake.supervisors


async def test_a_new_controller_adopts_what_it_finds_and_starts_nothing_twice(fake, tmp_path):
    first = Cluster(fake, PLAN, tmp_path)
    await first.ask("wait")
    await first.ask("scale", pools={"decode": 3})
    await asyncio.sleep(launcher_module.SAVE_POLL_S * 2)
    created = list(fake.created)
    await crash(first)
    fake.groups.add("decode-9")  # ordered by the old controller, which died before the actor was there
    async with running(fake, tmp_path) as second:
        assert fake.created == created
        assert set((await second.states()).values()) == {"ready"}
        assert len(await second.states()) == 5
        assert (await second.ask("status"))["epoch"] == 2
        assert fake.groups == set()
        with pytest.raises(ConfigError, match="controller 1 was replaced"):
            await second.ask("ensure", role="decode", count=4, fence=2)
            await second.ask("ensure", role="decode", count=4, fence=1)


async def test_a_worker_that_vanished_with_the_controller_is_missed_and_one_that_leaves_goes_on_leaving(fake, tmp_path):
    first = Cluster(fake, PLAN, tmp_path)
    await first.ask("wait")
    await asyncio.sleep(launcher_module.SAVE_POLL_S * 2)
    await crash(first)
    fake.supervisors["decode-1"].dies()
    fake.supervisors["prefill-1"].asked = True
    async with running(fake, tmp_path) as second:
        # The supervisor of decode-1 is dead, its process perhaps not yet: nobody else is called like it.
        await second.becomes(lambda s: s.get("decode-3") == "ready" and s.get("prefill-2") == "ready")
        assert "decode-1" not in await second.states()
        fake.supervisors["prefill-1"].exits(0)
        await second.becomes(lambda s: "prefill-1" not in s)


async def test_a_rollout_that_lost_its_controller_goes_back(fake, tmp_path):
    first = Cluster(fake, PLAN, tmp_path)
    await first.ask("wait")
    await asyncio.sleep(launcher_module.SAVE_POLL_S * 2)
    launcher = first.body._launcher
    new = msgspec.structs.replace(launcher.revision, number=2)
    await launcher.wait_ready(await launcher.start_worker("decode", new), first.lines.append)
    await crash(first)
    async with running(fake, tmp_path) as second:
        assert {p["revision"] for p in (await second.ask("status"))["processes"]} == {1}
        assert sorted(await second.states()) == ["decode-1", "decode-2", "gateway-1", "prefill-1"]


async def test_a_rollout_replaces_every_process(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.local.rollout.routable", lambda _: {f"{r}-{n}" for r in SPEC_ROLES for n in range(9)})
    async with running(fake, tmp_path) as cluster:
        before = set(fake.supervisors.values())
        await cluster.ask("rollout", sets={})
        assert before.isdisjoint(fake.supervisors.values())
        assert decode_saved(fake.saved).revision in {1, 2}
        await asyncio.sleep(launcher_module.SAVE_POLL_S * 2)
        assert decode_saved(fake.saved).revision == 2


async def test_a_rollout_never_changes_the_tokenizer(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.local.rollout.routable", lambda _: {f"{r}-{n}" for r in SPEC_ROLES for n in range(9)})
    for name, text in (("old", "{}"), ("new", "{}"), ("other", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    spec = msgspec.structs.replace(SPEC, model=str(tmp_path / "old"))
    async with running(fake, tmp_path, RayPlan(spec=spec, needs={})) as cluster:
        before = set(fake.supervisors.values())
        with pytest.raises(ConfigError, match="another tokenizer"):
            await cluster.ask("rollout", model_dir=str(tmp_path / "other"))
        assert set(fake.supervisors.values()) == before, "refused before anything was started"
        await cluster.ask("rollout", model_dir=str(tmp_path / "new"))
        assert before.isdisjoint(fake.supervisors.values())


async def test_a_host_that_cannot_start_the_process_holds_it_with_the_reason(fake, tmp_path):
    fake.refuses = ConfigError("no such model here")
    cluster = Cluster(fake, PLAN, tmp_path)
    with pytest.raises(ConfigError, match="no such model here"):
        await cluster.ask("wait")
    await cluster.ask("down", budget_s=0.1)
    assert fake.supervisors == {}


async def test_what_ray_refuses_is_a_crash_with_its_words_and_no_slow_start(fake, tmp_path):
    async def refuse(*_):
        raise ValueError("Invalid bundle label selector")

    fake.create = refuse
    cluster = Cluster(fake, PLAN, tmp_path)
    with pytest.raises(ConfigError, match="gateway-1 did not start: ValueError: Invalid bundle"):
        await cluster.ask("wait")
    await cluster.ask("down", budget_s=0.1)


async def test_a_worker_that_no_host_has_room_for_can_be_taken_back_at_once(fake, tmp_path):
    async with running(fake, tmp_path) as cluster:
        fake.is_full = True
        await cluster.ask("ensure", role="decode", count=3, fence=1)
        assert (await cluster.states())["decode-3"] == "starting"
        await cluster.ask("drain", worker="decode-3")
        assert "decode-3" not in fake.supervisors
        await cluster.ask("ensure", role="prefill", count=2, fence=1)  # and one that is still waiting when all ends


async def test_groups_of_several_nodes_are_removed_with_their_worker(fake, tmp_path):
    plan = RayPlan(spec=SPEC, needs={"decode": Needs(nodes=2)})
    async with running(fake, tmp_path, plan) as cluster:
        assert fake.groups == {"decode-1", "decode-2"}
        await cluster.ask("scale", pools={"decode": 1})
        assert fake.groups == {"decode-1"}


async def test_workers_are_spread_over_domains(fake, tmp_path):
    async with running(fake, tmp_path, RayPlan(spec=SPEC, needs={}, slices=2)):
        assert {n: s.domain for n, s in fake.supervisors.items() if n != "gateway-1"} == {
            "prefill-1": "a",
            "decode-1": "a",
            "decode-2": "b",
        }


async def test_the_workers_of_a_lost_domain_start_in_the_others(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "DOMAINS_POLL_S", 0.02)
    async with running(fake, tmp_path, RayPlan(spec=SPEC, needs={}, slices=2)) as cluster:
        fake.nodes = ["b"]
        fake.supervisors["decode-1"].dies()
        await cluster.becomes(lambda states: states.get("decode-3") == "ready")
        assert fake.supervisors["decode-3"].domain == "b"
        # Ray does not know yet that the domain is gone, so a worker waits there.
        fake.nodes, fake.is_full = ["a", "b"], True
        fake.supervisors["prefill-1"].dies()
        await cluster.becomes(lambda states: states.get("prefill-2") == "starting" and "prefill-2" in fake.supervisors)
        assert fake.supervisors["prefill-2"].domain == "a"
        fake.nodes, fake.is_full = ["b"], False
        await cluster.becomes(lambda states: states.get("prefill-2") == "ready")
        assert fake.supervisors["prefill-2"].domain == "b"
        await crash(cluster)
        cluster.body = RayController(RayPlan(spec=SPEC, needs={}, slices=2), fake, tmp_path)
        await cluster.ask("wait")
        assert {p["id"]: p["domain"] for p in (await cluster.ask("status"))["processes"]} == {
            "gateway-1": "",
            "prefill-2": "b",
            "decode-2": "b",
            "decode-3": "b",
        }


async def test_a_cluster_of_slices_does_not_begin_without_its_domains(fake, tmp_path):
    fake.nodes = ["a"]
    cluster = Cluster(fake, RayPlan(spec=SPEC, needs={}, slices=2), tmp_path)
    with pytest.raises(ConfigError, match="ray start --labels"):
        await cluster.ask("wait")
    await cluster.ask("down", budget_s=0.1)


def test_the_domain_with_the_fewest_workers_is_next():
    assert choose_domain(["a"], [], 1) == ""
    assert choose_domain(["b", "a", "a"], ["a"], 2) == "b"
    assert choose_domain(["c", "b", "a"], ["a", "b"], 2) == "a", "not more domains than slices"
    assert choose_domain(["b"], ["b"], 2) == "b"
    assert choose_domain([], ["b"], 2) == ""


def test_a_description_becomes_what_actors_need():
    description = ClusterDescription(slices=2, decode=PoolPart(gpus=8, nodes=2, cpus=4.0, memory_gib=64.0))
    plan = plan_of(spec_on_hosts(description), description)
    assert plan.needs["decode"] == Needs(gpus=8, nodes=2, cpus=4.0, memory_gib=64.0)
    assert (plan.slices, plan.membership_port) == (2, 9500)
    assert missing_resources(plan, {"gateway": 1, "prefill": 1, "decode": 1}) == ""
    assert "ray start --resources '{\"decode\":1}'" in missing_resources(plan, {"gateway": 1, "prefill": 1})


@pytest.mark.parametrize("role", ["gateway", "prefill"])
def test_a_host_tells_its_process_only_what_its_configuration_knows(role, tmp_path):
    kind = {"gateway": GatewayConfig, "prefill": PrefillWorkerConfig}[role]
    own = [] if role == "gateway" else ["worker.id=w"]
    sets = host_sets(role, host="10.0.0.7", domain="a", run_dir=tmp_path, secret=tmp_path / "s", model=tmp_path)
    config = load(kind, None, [*own, *sets])
    assert (config.http.host if role == "gateway" else config.worker.host) == "10.0.0.7"
    assert role == "gateway" or config.worker.domain == "a"


async def test_the_controller_hosts_the_autoscaler_with_its_epoch_as_the_fence(fake, tmp_path, monkeypatch):
    spec = msgspec.structs.replace(SPEC, autoscale=True, sets={"controller": ("controller.interval_s=0.05",)})
    # Nobody listens at the gateways' addresses: figures are stale, so it holds, and says so.
    async with running(fake, tmp_path, RayPlan(spec=spec, needs={}, membership_port=1)) as cluster:
        journal = tmp_path / "controller-1.decisions.jsonl"
        await cluster.becomes(lambda _: journal.exists() and journal.read_text().count("\n") >= 2)
        entry = json.loads(journal.read_text().splitlines()[0])
        assert (entry["fence"], entry["advisory"]) == (1, False)
        assert {i["id"] for i in entry["signals"].get("instances", [])} <= set(await cluster.states())
        assert len(await cluster.states()) == 4
        monkeypatch.setattr("deploy.local.rollout.routable", lambda _: set(fake.supervisors))
        await cluster.ask("rollout", sets={"controller": ["autoscale.budget=7"]})
        await cluster.becomes(lambda _: json.loads(journal.read_text().splitlines()[-1])["rules"]["budget"] == 7)
    assert (tmp_path / "controller.secret").stat().st_mode & 0o077 == 0
