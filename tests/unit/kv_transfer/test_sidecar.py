"""The sidecar as a process: reads through it, its death, its end with the worker. The engine in it is a fake."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from core.errors import ConfigError, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.backends.native import EngineSpec
from kv_transfer.backends.sidecar import Sidecar
from kv_transfer.memory import allocate, region_view
from tests.fakes.kv_ends import copies

FAKE = "tests.fakes.fake_native"
SIZE = 1 << 20


@pytest.fixture
def memory(tmp_path):
    held = []

    def make(fill=None):
        memory = allocate([SIZE], incarnation=fresh_incarnation(), directory=str(tmp_path))
        held.append(memory)
        if fill is not None:
            region_view(memory.regions[0])[:] = np.random.default_rng(fill).integers(0, 256, SIZE, dtype=np.uint8)
        return memory

    yield make
    for one in held:
        one.close()


@pytest.fixture
def sidecar(tmp_path):
    opened = []

    def make(memory, *, serves=False, on_death=lambda: None, **options):
        spec = EngineSpec(module=FAKE, name=fresh_incarnation(), serves=serves, options=options)
        opened.append(Sidecar(spec, memory.regions, str(tmp_path), on_death))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_a_read_between_two_sidecars_lands_in_the_mapped_ring(memory, sidecar):
    pool, ring = memory(fill=1), memory()
    source, target = sidecar(pool, serves=True), sidecar(ring)
    peer = target.connect(source.export(), 5.0)
    ticket = target.post(peer, copies([10, 5000], [0, 100], [100, 4096]))
    assert target.wait(ticket, 60.0).error == ""
    got, all_of = region_view(ring.regions[0]), region_view(pool.regions[0])
    assert np.array_equal(got[:100], all_of[10:110])
    assert np.array_equal(got[100:4196], all_of[5000:9096])
    assert not got[4196:].any()


def test_a_native_crash_ends_the_read_with_proof_and_leaves_the_worker_alone(memory, sidecar):
    died = threading.Event()
    source = sidecar(memory(fill=1), serves=True)
    target = sidecar(memory(), crash="", on_death=died.set)
    peer = target.connect(source.export(), 5.0)
    outcome = target.wait(target.post(peer, copies([0], [0], [10])), 60.0)
    assert outcome.proven
    assert "status -11" in outcome.error
    assert died.wait(60)
    assert target.broken
    assert not source.broken
    late = target.wait(target.post(peer, copies([0], [0], [10])), 60.0)
    assert late.proven
    assert late.error
    with pytest.raises(TransferFailed):
        target.connect(source.export(), 1.0)


def test_closing_is_a_fence_even_for_a_read_that_never_ends(memory, sidecar):
    source, target = sidecar(memory(fill=1), serves=True), sidecar(memory(), hang="")
    ticket = target.post(target.connect(source.export(), 5.0), copies([0], [0], [10]))
    assert target.wait(ticket, 0.01) is None
    target.close()
    assert not psutil.pid_exists(target.pid)
    assert target.wait(ticket, 0.0).proven


def test_a_stopped_sidecar_is_fenced_too(memory, sidecar):
    source, target = sidecar(memory(fill=1), serves=True), sidecar(memory())
    peer = target.connect(source.export(), 5.0)
    os.kill(target.pid, signal.SIGSTOP)
    ticket = target.post(peer, copies([0], [0], [10]))
    target.close()
    assert target.wait(ticket, 0.0).error == "the sidecar was stopped"


def test_nothing_lands_after_the_fence_while_an_unproven_read_still_writes(memory, sidecar):
    pool, ring = memory(fill=1), memory()
    source, target = sidecar(pool, serves=True), sidecar(ring, unproven="", late_s="4.0")
    peer = target.connect(source.export(), 5.0)
    n = 200
    slices = [i * 4096 for i in range(n)]
    outcome = target.wait(target.post(peer, copies(slices, slices, [4096] * n)), 60.0)
    assert not outcome.proven
    landed = region_view(ring.regions[0])
    end = time.monotonic() + 60
    before = int((landed != 0).sum())
    while int((landed != 0).sum()) == before and time.monotonic() < end:
        time.sleep(0.001)
    # The negative control: without the fence it does write on.
    assert int((landed != 0).sum()) > before
    target.close()
    landed[:] = 0
    time.sleep(0.1)  # nothing to wait for: the point is that nothing comes
    assert not landed.any()


def test_an_engine_that_cannot_open_is_a_plain_error(memory, sidecar):
    with pytest.raises(ConfigError, match="no such wheel"):
        sidecar(memory(), refuse="no such wheel")


def test_private_memory_has_no_sidecar(tmp_path):
    memory = allocate([4096], incarnation=fresh_incarnation())
    with pytest.raises(ConfigError, match="shared memory"):
        Sidecar(EngineSpec(module=FAKE, name="x"), memory.regions, str(tmp_path))
    memory.close()


def test_a_sidecar_ends_with_a_worker_that_is_killed(tmp_path):
    code = (
        "import sys, time\n"
        "from core.ids import fresh_incarnation\n"
        "from kv_transfer.backends.native import EngineSpec\n"
        "from kv_transfer.backends.sidecar import Sidecar\n"
        "from kv_transfer.memory import allocate\n"
        f"memory = allocate([4096], incarnation=fresh_incarnation(), directory={str(tmp_path)!r})\n"
        f"sidecar = Sidecar(EngineSpec(module={FAKE!r}, name='x'), memory.regions, {str(tmp_path)!r})\n"
        "print(sidecar.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        pid = int(worker.stdout.readline())
        child = psutil.Process(pid)
        worker.kill()
    child.wait(60)


def test_two_agents_with_one_telemetry_environment_both_start(memory, tmp_path, monkeypatch):
    """Report 28: every process of a host gets the same exporter's port, and only one can have it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {
            "NIXL_TELEMETRY_ENABLE": "y",
            "NIXL_TELEMETRY_EXPORTER": "prometheus",
            "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(taken.getsockname()[1]),
        }.items():
            monkeypatch.setenv(name, value)
        spec = EngineSpec(module="kv_transfer.backends.nixl_engine", name=fresh_incarnation(), serves=True)
        sidecar = Sidecar(spec, memory(fill=1).regions, str(tmp_path))
        assert sidecar.export()
        sidecar.close()
