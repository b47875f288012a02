"""What every actuator promises; a place plugs in by adding its maker to MAKERS."""

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import ConfigError
from deploy.actuators.api import StaleFence
from deploy.actuators.fake import FakeActuator
from deploy.actuators.kubernetes import KubernetesActuator
from deploy.actuators.local import LocalActuator
from deploy.cluster_description import ClusterDescription
from deploy.local.commands import Commands
from deploy.local.control import ControlServer
from deploy.local.launcher import Launcher
from deploy.local.slot import SlotState
from deploy.local.spec import ClusterSpec
from tests.deploy.ray.fake_ray import on_fake_ray
from tests.fakes.kubernetes import FakeKubernetesApi


def kubernetes():
    """The API server knows the newest fence from the lease, not from orders: so the test's first order raises it."""
    api = FakeKubernetesApi()

    class Fenced(KubernetesActuator):
        async def ensure(self, role, count, *, fence):
            spec = api.lease["spec"]
            spec["leaseTransitions"] = max(fence, spec.get("leaseTransitions", 0))
            await super().ensure(role, count, fence=fence)

    return Fenced(api, SystemClock(), namespace="tandem", remove_timeout_s=5.0, drain=api.drain, poll_s=0.001)


@asynccontextmanager
async def local():
    """The launcher's own commands over its own socket; only processes are missing."""

    class WithoutProcesses(Launcher):
        async def _launch(self, slot):
            slot.state = SlotState.READY

    spec = ClusterSpec(prefill=0, decode=0, prefill_mode="local")
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        launcher = WithoutProcesses(
            spec=spec, run_dir=run_dir, model_dir=run_dir, clock=SystemClock(), report=lambda _: None
        )
        control = ControlServer(run_dir, Commands(launcher, lambda _: {}).handle)
        await control.start()
        yield LocalActuator(run_dir, remove_timeout_s=5.0)
        await control.close()


MAKERS = {
    "fake": lambda: FakeActuator(ClusterDescription()),
    "kubernetes": kubernetes,
    "local": local,
    "ray": on_fake_ray,
}


@pytest.fixture(params=sorted(MAKERS))
async def actuator(request):
    made = MAKERS[request.param]()
    if not hasattr(made, "__aenter__"):
        yield made
        return
    async with made as entered:
        yield entered


async def pool(actuator, role):
    return [i.id for i in await actuator.list() if i.role == role]


async def test_ensure_brings_a_pool_up_and_leaves_the_other_alone(actuator):
    await actuator.ensure("prefill", 2, fence=1)
    await actuator.ensure("decode", 3, fence=1)
    assert (len(await pool(actuator, "prefill")), len(await pool(actuator, "decode"))) == (2, 3)


async def test_ensure_never_removes(actuator):
    await actuator.ensure("decode", 3, fence=1)
    await actuator.ensure("decode", 1, fence=1)
    assert len(await pool(actuator, "decode")) == 3


async def test_remove_takes_exactly_the_named_worker(actuator):
    await actuator.ensure("decode", 3, fence=1)
    victim = (await pool(actuator, "decode"))[1]
    kept = [i for i in await pool(actuator, "decode") if i != victim]
    await actuator.remove(victim, fence=1)
    assert await pool(actuator, "decode") == kept


async def test_removing_twice_is_no_error(actuator):
    await actuator.ensure("decode", 2, fence=1)
    victim = (await pool(actuator, "decode"))[0]
    await actuator.remove(victim, fence=1)
    await actuator.remove(victim, fence=1)
    assert len(await pool(actuator, "decode")) == 1


async def test_a_replaced_controller_changes_nothing(actuator):
    await actuator.ensure("decode", 1, fence=2)
    with pytest.raises(StaleFence):
        await actuator.ensure("decode", 5, fence=1)
    with pytest.raises(StaleFence):
        await actuator.remove((await pool(actuator, "decode"))[0], fence=1)
    assert len(await pool(actuator, "decode")) == 1


async def test_an_unknown_pool_is_refused(actuator):
    with pytest.raises(ConfigError, match="prefill and decode"):
        await actuator.ensure("router", 1, fence=1)


async def test_describe_names_the_place(actuator):
    assert actuator.describe()["place"]
