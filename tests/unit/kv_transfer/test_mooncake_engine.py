"""The Mooncake adapter over a scripted library: what counts as proof, how reads are cut, what is tried again."""

import ctypes
import sys
import threading

import numpy as np
import pytest

from core.errors import BadRequest, ConfigError, NoCapacity, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.backends import mooncake_engine
from kv_transfer.backends.mooncake_engine import (
    MAX_DESCRIPTORS,
    MAX_WAITING,
    MooncakeEngine,
    check_version,
    open_engine,
)
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.memory import allocate, region_view
from tests.fakes.kv_ends import copies

NBYTES = 1 << 16


class Library:
    """Copies within the process and answers what the test wants."""

    def __init__(self):
        self.answers: list[int] = []
        self.batches: list[int] = []
        self.alive = 0
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.at_once = 0
        self.most_at_once = 0
        self.registered: list[tuple[int, int]] = []

    def initialize(self, host, metadata, protocol, device):
        self.started = (host, metadata, protocol, device)
        return 0

    def register_memory(self, address, nbytes):
        self.registered.append((address, nbytes))
        return 0

    def get_rpc_port(self):
        return 15000

    def send_probe(self, peer):
        return self.alive

    def batch_transfer_sync_read(self, peer, local, remote, sizes):
        self.entered.set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.gate.wait(60)
        self.batches.append(len(sizes))
        code = self.answers.pop(0) if self.answers else 0
        if code == 0:
            for to, at, n in zip(local, remote, sizes, strict=True):
                ctypes.memmove(to, at, n)
        self.at_once -= 1
        return code


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(mooncake_engine, "BACK_OFF_S", 0.0)


@pytest.fixture
def ends():
    memory = [allocate([NBYTES], incarnation=fresh_incarnation()) for _ in range(2)]
    served, landed = (region_view(m.regions[0]) for m in memory)
    served[:] = np.random.default_rng(5).integers(1, 255, NBYTES, dtype=np.uint8)
    library = Library()
    source = MooncakeEngine(EngineSpec(module="m", name="s", serves=True), memory[0].regions, Library())
    reader = MooncakeEngine(EngineSpec(module="m", name="r"), memory[1].regions, library)
    yield library, reader, reader.connect(source.export(), 1.0), served, landed
    library.gate.set()
    reader.close()
    source.close()


def read(reader, peer, count=4, size=16):
    at = [i * size for i in range(count)]
    return reader.post(peer, copies(at, at, [size] * count))


def test_code_0_is_the_only_proof(ends):
    library, reader, peer, served, landed = ends
    assert reader.wait(read(reader, peer), 5.0) == Outcome()
    assert np.array_equal(landed[:64], served[:64])


def test_reads_are_cut_at_1024_descriptors_and_go_one_batch_at_a_time(ends):
    library, reader, peer, _, _ = ends
    library.gate.clear()
    tickets = [read(reader, peer, count=2500) for _ in range(3)]
    library.gate.set()
    assert [reader.wait(t, 60.0) for t in tickets] == [Outcome()] * 3
    assert library.batches == [MAX_DESCRIPTORS, MAX_DESCRIPTORS, 452] * 3
    assert library.most_at_once == 1


def test_a_batch_that_fails_once_is_tried_again_in_place_and_is_whole_but_never_proven(ends):
    """Report 32: the first batch after an idle gap. What the failed attempt left queued may land again later."""
    library, reader, peer, served, landed = ends
    library.answers = [-1]
    assert reader.wait(read(reader, peer), 5.0) == Outcome("", proven=False)
    assert np.array_equal(landed[:64], served[:64])


def test_one_failure_leaves_the_peer_usable(ends):
    """Report 8: no session is black-listed."""
    library, reader, peer, _, _ = ends
    library.answers = [-1] * mooncake_engine.ATTEMPTS
    outcome = reader.wait(read(reader, peer), 5.0)
    assert "failed a read 3 times" in outcome.error
    assert not outcome.proven
    assert reader.wait(read(reader, peer), 5.0) == Outcome()


def test_a_dead_peer_is_not_tried_again(ends):
    library, reader, peer, _, _ = ends
    library.answers, library.alive = [-1, 0], -102
    outcome = reader.wait(read(reader, peer), 5.0)
    assert "is gone" in outcome.error
    assert not outcome.proven
    assert library.batches == [4]


def test_reads_behind_the_death_of_a_peer_are_not_begun_and_so_leave_nothing_without_proof(ends):
    library, reader, peer, _, _ = ends
    library.answers, library.alive = [-1], -102
    assert not reader.wait(read(reader, peer), 5.0).proven
    outcome = reader.wait(read(reader, peer), 5.0)
    assert "is gone" in outcome.error
    assert outcome.proven
    assert library.batches == [4], "it was begun"
    library.alive = 0
    assert reader.wait(read(reader, peer), 5.0) == Outcome(), "a peer that answers again is read again"


def test_what_is_open_when_the_engine_is_destroyed_is_proven_over(ends):
    library, reader, peer, _, _ = ends
    library.gate.clear()
    running, waiting = read(reader, peer), read(reader, peer)
    assert library.entered.wait(60), "the first batch was never started"
    assert reader.wait(running, 0.0) is None
    lane = reader._peers[peer]
    closing = threading.Thread(target=reader.close)
    closing.start()
    assert lane._stopping.wait(60), "the engine does not begin to close"
    library.gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert reader.wait(waiting, 0.0).proven
    assert library.batches == [4], "the second batch was never started"


def test_a_full_queue_refuses_and_forgets_the_read(ends):
    library, reader, peer, _, _ = ends
    library.gate.clear()
    with pytest.raises(NoCapacity):
        for _ in range(MAX_WAITING + 2):
            read(reader, peer)
    library.gate.set()


def test_what_cannot_be_right_never_reaches_the_library(ends):
    library, reader, peer, _, _ = ends
    for bad in (copies([0], [NBYTES - 1], [2]), copies([0], [0], [8], regions=(4, 0)), copies([0], [0], [0])):
        with pytest.raises(BadRequest):
            reader.post(peer, bad)
    reader.disconnect(peer)
    with pytest.raises(TransferFailed):
        read(reader, peer)
    assert library.batches == []


@pytest.mark.parametrize("blob", [b"", b"garbage", b"\x92\xa1x\x91\x01"])
def test_a_damaged_description_is_refused(ends, blob):
    with pytest.raises(TransferFailed):
        ends[1].connect(blob, 1.0)


def test_the_handshake_is_between_peers_and_unknown_protocols_are_refused(ends):
    library = ends[0]
    assert library.started == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    with pytest.raises(ConfigError, match="nosuch"):
        MooncakeEngine(EngineSpec(module="m", name="x", options={"protocol": "nosuch"}), [], Library())


def test_rdma_without_an_adapter_is_loud(monkeypatch):
    monkeypatch.setattr(mooncake_engine, "has_adapter", lambda: False)
    with pytest.raises(ConfigError, match="needs an RDMA adapter"):
        MooncakeEngine(EngineSpec(module="m", name="x", options={"protocol": "rdma"}), [], Library())


def test_a_refused_region_or_start_is_a_plain_error():
    library = Library()
    library.register_memory = lambda address, nbytes: -7
    region = MemoryRegion(id=3, address=4096, nbytes=4096, writable=True)
    with pytest.raises(ConfigError, match="refused KV region 3 of 4096 bytes"):
        MooncakeEngine(EngineSpec(module="m", name="x"), [region], library)
    library.initialize = lambda *_: -1
    with pytest.raises(ConfigError, match="did not start"):
        MooncakeEngine(EngineSpec(module="m", name="x"), [], library)


@pytest.mark.parametrize("version", ["0.3.11", "0.3.9.post2", "0.2.99"])
def test_wheels_that_complete_before_the_receiver_has_the_bytes_are_refused(version):
    """Report 31."""
    with pytest.raises(ConfigError, match=r"0\.3\.12 or newer"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "1.0"])
def test_newer_wheels_pass(version):
    check_version(version)


def test_a_missing_wheel_names_the_extra_and_the_system_package(monkeypatch):
    with pytest.raises(ConfigError, match=r"pip install '\.\[mooncake\]'.*apt-get install libibverbs1"):
        check_version("")
    monkeypatch.setattr(mooncake_engine, "installed_version", lambda: "0.3.13")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="libibverbs1"):
        open_engine(EngineSpec(module="m", name="n"), [])
