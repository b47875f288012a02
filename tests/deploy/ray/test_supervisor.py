"""What a supervisor does on its host: a real process, and the socket that gateways hand on."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from core.clock import SystemClock
from core.config import to_toml
from core.errors import ConfigError
from core.lifecycle import EXIT_PREFLIGHT
from deploy.local.spec import ClusterSpec, Revision, gateway_config
from deploy.ray.api import Order
from deploy.ray.shared_listener import take_listener
from deploy.ray.supervisor import HostSupervisor
from engine.models.builtin import prepare_scripted
from engine.models.script import ScriptedConfig


def ask(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        return client.getsockname()


def test_a_listener_outlives_its_first_holder_with_its_queue(tmp_path):
    place = str(tmp_path)
    first = take_listener(place, "gateway-1", ["gateway-2"], "127.0.0.1", 0)
    with socket.socket(fileno=os.dup(first.fileno())) as same:
        port = same.getsockname()[1]
    waiting = socket.create_connection(("127.0.0.1", port), timeout=5)
    second = take_listener(place, "gateway-2", ["gateway-1"], "127.0.0.1", port)
    first.close()
    with socket.socket(fileno=os.dup(second.fileno())) as listener, waiting:
        listener.settimeout(5)
        connection, address = listener.accept()
        connection.close()
        assert address == waiting.getsockname(), "who waited at the first is served by the second"
    with pytest.raises(ConfigError, match="choose another"):
        take_listener(str(tmp_path / "other"), "gateway-1", ["gateway-2"], "127.0.0.1", port)
    second.close()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def order(slot_id, model, run_dir):
    spec = ClusterSpec(model="scripted", port=0)
    config = gateway_config(
        spec,
        gateway_id=slot_id,
        run_dir=run_dir,
        model_dir=Path("elsewhere"),
        http_port=0,
        listener_fd=-1,
        membership_port=0,
        sibling="127.0.0.1:1",
    )
    return Order(
        slot_id=slot_id,
        role="gateway",
        revision=Revision(number=1, spec=spec, model_dir=model),
        config_toml=to_toml(config),
        sets=("http.hold_s=0.0",),
        threads=1,
        domain="",
        secret="s" * 32,
    )


def supervisor(run_dir):
    return HostSupervisor(run_dir=run_dir, host="127.0.0.1", domain="", clock=SystemClock())


@pytest.mark.cluster
async def test_a_process_is_started_watched_signalled_and_reported(tmp_path):
    model = prepare_scripted(tmp_path, ScriptedConfig())
    found = supervisor(tmp_path / "run")
    told = await found.start(order("gateway-1", model, tmp_path / "elsewhere"))
    async with asyncio.timeout(50):
        facts = await found.ready()
    assert facts["pid"] == told.pid
    assert str(facts["http_address"]).startswith("127.0.0.1:")
    assert (tmp_path / "run" / "gateway-1.secret").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="started already"):
        await found.start(order("gateway-1", model, tmp_path))
    await found.signal(signal.SIGTERM)
    async with asyncio.timeout(50):
        assert (await found.lifetime()).code == 0
    assert (await found.told()).is_asked
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["gateway-1.log"]


async def test_a_missing_model_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="neither a built-in model"):
        await supervisor(tmp_path).start(order("gateway-1", tmp_path / "nothing", tmp_path))


@pytest.mark.cluster
async def test_a_failed_start_says_why(tmp_path):
    broken = order("gateway-1", prepare_scripted(tmp_path, ScriptedConfig()), tmp_path)
    found = supervisor(tmp_path / "run")
    await found.start(msgspec.structs.replace(broken, sets=("no.such=1",)))
    async with asyncio.timeout(50):
        end = await found.lifetime()
        assert await found.ready() == {}
    assert end.code == EXIT_PREFLIGHT
    assert "no.such" in end.log_tail
