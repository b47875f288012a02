"""The NIXL agent as an engine, with the real wheel, both ends in this process: what the library does when misused."""

import gc
import itertools
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest

from core.clock import SystemClock
from core.errors import BadRequest, ConfigError, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.backends.native import EngineSpec
from kv_transfer.backends.nixl_engine import MAX_PAUSE_S, NixlEngine, backend_options, open_engine
from kv_transfer.backends.nixl_library import Nixl
from tests.fakes.kv_ends import copies

PAGE, PAGES = 4096, 256
SIZE = PAGE * PAGES


class End:
    def __init__(self, seed=None, name=None, lane="cma"):
        self.bytes = np.zeros(SIZE, np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        region = MemoryRegion(id=0, address=int(self.bytes.ctypes.data), nbytes=SIZE, writable=True)
        spec = EngineSpec(
            module="kv_transfer.backends.nixl_engine",
            name=name or fresh_incarnation(),
            serves=seed is not None,
            options={"lane": lane},
        )
        self.engine = open_engine(spec, [region])

    def read(self, peer, records, timeout_s=60.0):
        outcome = self.engine.wait(self.engine.post(peer, records), timeout_s)
        assert outcome is not None
        return outcome


@pytest.fixture
def ends():
    opened = []

    def make(*arguments, **options):
        opened.append(End(*arguments, **options))
        return opened[-1]

    yield make
    for end in opened:
        end.engine.close()
    gc.collect()


def test_a_grid_goes_by_prepared_lists_and_anything_else_by_descriptors(ends):
    source, target = ends(1), ends()
    peer = target.engine.connect(source.engine.export(), 5.0)
    order = np.random.default_rng(2).permutation(PAGES)
    grid = copies((order * PAGE).tolist(), (np.arange(PAGES) * PAGE).tolist(), [PAGE] * PAGES)
    assert target.read(peer, grid).error == ""
    assert np.array_equal(target.bytes.reshape(PAGES, PAGE), source.bytes.reshape(PAGES, PAGE)[order])
    target.bytes[:] = 0
    ragged = copies([3, 5000, 100], [0, 7, 200], [5, 99, 4096])
    assert target.read(peer, ragged).error == ""
    for at, to, n in ((3, 0, 5), (5000, 7, 99), (100, 200, 4096)):
        assert np.array_equal(target.bytes[to : to + n], source.bytes[at : at + n])
    shifted = copies([17 + PAGE, 17], [1, 1 + PAGE], [PAGE, PAGE])
    assert target.read(peer, shifted).error == ""
    assert np.array_equal(target.bytes[1 : 1 + PAGE], source.bytes[17 + PAGE : 17 + 2 * PAGE])


def test_agents_that_have_nothing_to_do_take_next_to_no_cpu(ends):
    """Left alone, the progress thread of the library keeps a core busy for as long as the agent lives."""
    source, target = ends(1), ends()
    peer = target.engine.connect(source.engine.export(), 5.0)
    target.read(peer, copies([0], [0], [PAGE]))

    def share():
        before, start = time.process_time(), time.monotonic()
        time.sleep(0.5)
        return (time.process_time() - before) / (time.monotonic() - start)

    # A busy loop would take a tenth every time even beside nine others on its core.
    assert any(share() < 0.05 for _ in range(10))


def test_a_waiting_read_is_looked_at_less_and_less_often(ends):
    source, target = ends(1), ends()
    peer = target.engine.connect(source.engine.export(), 5.0)
    target.read(peer, copies([0], [0], [PAGE]))
    looks = []
    target.engine._agent.transfer = lambda handle: "PROC"
    target.engine._agent.check_xfer_state = lambda handle: looks.append(time.monotonic()) or "PROC"
    ticket = target.engine.post(peer, copies([0], [0], [PAGE]))
    assert target.engine.wait(ticket, 0.2) is None
    assert 1 < len(looks) < 400
    # The pause before the last look is what was left of the time.
    assert min(b - a for a, b in itertools.pairwise(looks[-6:-1])) >= MAX_PAUSE_S


def test_a_damaged_description_is_refused_and_the_good_one_still_works(ends):
    """Section 2.4: the library poisons a name for ever by one damaged blob; ours names another agent every time."""
    source, target = ends(1), ends()
    good = source.engine.export()
    agent, pid, metadata, regions = msgspec.msgpack.decode(good)
    for bad in (b"", b"\x93", msgspec.msgpack.encode(("other", pid, b"garbage" * 10, regions))):
        with pytest.raises(TransferFailed):
            target.engine.connect(bad, 1.0)
    peer = target.engine.connect(good, 5.0)
    assert target.read(peer, copies([0], [0], [PAGE])).error == ""
    assert agent


def test_unknown_regions_and_peers_post_nothing(ends):
    source, target = ends(1), ends()
    peer = target.engine.connect(source.engine.export(), 5.0)
    for regions in ((9, 0), (0, 9)):
        with pytest.raises(BadRequest):
            target.engine.post(peer, copies([0], [0], [10], regions=regions))
    with pytest.raises(TransferFailed):
        target.engine.post(peer, copies([SIZE], [0], [PAGE]))
    with pytest.raises(TransferFailed):
        target.engine.post(peer + 1, copies([0], [0], [10]))


def test_plans_are_made_anew_after_a_peer_came_back(ends):
    """Report 30: prepared lists die with the metadata that they were made from."""
    source, target = ends(1), ends()
    grid = copies([0, PAGE], [PAGE, 0], [PAGE, PAGE])
    for _ in range(3):
        peer = target.engine.connect(source.engine.export(), 5.0)
        assert target.read(peer, grid).error == ""
        target.engine.disconnect(peer)
        target.engine.disconnect(peer)


def test_two_connections_to_one_agent_are_independent(ends):
    source, target = ends(1), ends()
    first, second = (target.engine.connect(source.engine.export(), 5.0) for _ in range(2))
    target.engine.disconnect(first)
    assert target.read(second, copies([0], [0], [PAGE])).error == ""


def test_threads_may_connect_read_and_leave_at_once(ends):
    """Report 11: the library's agents are not thread-safe unless asked to be."""
    sources, target = [ends(seed) for seed in (1, 2)], ends()
    wrong = []

    def work(number):
        source = sources[number % 2]
        for turn in range(20):
            peer = target.engine.connect(source.engine.export(), 5.0)
            at = number * 4 * PAGE
            if target.read(peer, copies([turn * PAGE], [at], [PAGE])).error or not np.array_equal(
                target.bytes[at : at + PAGE], source.bytes[turn * PAGE : (turn + 1) * PAGE]
            ):
                wrong.append((number, turn))
            target.engine.disconnect(peer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_source_that_is_gone_ends_reads_with_proof(ends):
    source, target = ends(1, lane="tcp"), ends(lane="tcp")
    peer = target.engine.connect(source.engine.export(), 5.0)
    assert target.read(peer, copies([0], [0], [PAGE])).error == ""
    source.engine.close()
    outcome = target.read(peer, copies([0], [0], [PAGE]))
    assert outcome.proven
    assert "gone" in outcome.error


def test_a_handle_is_not_released_before_its_end():
    """Report 27: a release is no abort; it frees what the library still uses."""
    released, states = [], ["PROC", "PROC", "DONE"]

    class Handle:
        def release(self):
            released.append(states[:])

    class Agent:
        agent = None

        def __getattr__(self, name):
            return lambda *a, **k: object()

        def initialize_xfer(self, *arguments):
            return Handle()

        def add_remote_agent(self, metadata):
            return b"there"

        def transfer(self, handle):
            return states.pop(0)

        check_xfer_state = transfer

    library = Nixl()
    library.agent = lambda name, serves: Agent()
    memory = np.zeros(64, np.uint8)
    region = MemoryRegion(id=0, address=int(memory.ctypes.data), nbytes=64, writable=True)
    engine = NixlEngine(EngineSpec(module="", name="here"), [region], library, SystemClock())
    peer = engine.connect(msgspec.msgpack.encode(("there", 1, b"", ((0, 4096, 64, -1),))), 1.0)
    ticket = engine.post(peer, copies([0], [0], [10]))
    assert engine.wait(ticket, 0.0) is None
    assert released == []
    assert engine.wait(ticket, 60.0).error == ""
    assert released == [[]]


@pytest.mark.parametrize("name", ["nixlBackendError", "nixlUnknownError"])
def test_a_failure_that_proves_nothing_is_told_as_such(ends, name):
    source, target = ends(1), ends()
    peer = target.engine.connect(source.engine.export(), 5.0)
    kind = next(kind for kind in Nixl().errors if kind.__name__ == name)

    def fail(handle):
        raise kind("injected")

    target.engine._agent.transfer = fail
    assert not target.read(peer, copies([0], [0], [10])).proven


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_a_plain_error(host):
    region = MemoryRegion(id=0, address=4096, nbytes=64, writable=True)
    with pytest.raises(ConfigError, match=host):
        open_engine(EngineSpec(module="", name="x", host=host), [region])


def test_nothing_listens_beyond_the_configured_address(ends):
    """Report 25 and section 9.12: the library's data ports take no credentials."""
    ends(1, lane="tcp"), ends(1, lane="cma")
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}


@pytest.mark.parametrize("lane", ["any", "cma", "cuda", "rdma", "tcp"])
def test_device_memory_is_read_by_its_own_way_where_ucx_sees_no_nvlink(lane):
    asked = backend_options(lane, "127.0.0.1")["engine_config"].split(",")
    assert ("CUDA_IPC_ENABLE_GET_ZCOPY=y" in asked) == (lane == "cuda")
    assert ("TLS=tcp" in asked) == (lane == "tcp")
    assert ("NET_DEVICES=lo" in asked) == (lane != "rdma")
