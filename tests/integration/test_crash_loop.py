"""A worker that crashes at every start: bounded restarts with growing pauses, then held with its reason; others stay."""

import asyncio

import pytest

from core.clock import SystemClock
from deploy.local import restart
from deploy.local.launcher import Launcher
from deploy.local.spec import SERVICE_MODULES, ClusterSpec
from deploy.status import render_status
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig

pytestmark = [pytest.mark.cluster]


async def test_a_crashing_worker_is_held_after_six_restarts_and_nobody_else_is_touched(tmp_path, monkeypatch):
    # Pauses of a hundredth; which pauses follow each other is tests/unit/deploy/test_restart.py's.
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(restart, "MAX_DELAY_S", 0.05)
    said = []
    spec = ClusterSpec(model="scripted", prefill=0, decode=0, prefill_mode="local", port=0, drain_s=5.0)
    model = prepare_scripted(tmp_path, ScriptedConfig())
    launcher = Launcher(spec=spec, run_dir=tmp_path, model_dir=model, clock=SystemClock(), report=said.append)
    try:
        await launcher.start()
        await launcher.order("prefill", 1)
        await launcher.wait_ready(launcher.slots("prefill")[0], said.append)
        others = {slot.id: slot.pid for role in ("gateway", "prefill") for slot in launcher.slots(role)}
        monkeypatch.setitem(SERVICE_MODULES, "decode", "tests.fakes.crashing_worker")
        await launcher.order("decode", 1)
        [crashing] = launcher.slots("decode")
        async with asyncio.timeout(120):
            while crashing.state != "held":  # noqa: ASYNC110 - a state of the launcher, not of ours
                await asyncio.sleep(0.05)
        assert len(crashing.history.restarts) == restart.HOLD_AFTER_RESTARTS
        assert crashing.log_tail().splitlines()[0] == "line 11 of a worker that will crash", (
            "the last 50 lines are kept"
        )
        assert any("decode-1: held" in line and "the thirteenth bolt is missing" in line for line in said)
        assert "6 restarts within an hour" in render_status(launcher.describe())
        assert {slot.id: slot.pid for role in ("gateway", "prefill") for slot in launcher.slots(role)} == others
    finally:
        await launcher.down(5.0)
