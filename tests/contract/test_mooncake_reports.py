"""Public reports about Mooncake's transfer engine, against the real wheel in this process."""

import time

import numpy as np
import pytest

from core.errors import TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.backends import mooncake_engine
from kv_transfer.backends.mooncake_engine import open_engine
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.memory import allocate, region_view
from tests.fakes.kv_ends import copies, require

PAGE, PAGES = 4096, 4096
WATCH_S = 0.5
FILL = 201


@pytest.fixture
def served():
    require("mooncake")
    memory = allocate([PAGE * PAGES], incarnation=fresh_incarnation())
    region_view(memory.regions[0])[:] = np.random.default_rng(9).integers(0, 200, PAGE * PAGES, dtype=np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def landed(served):
    memory = allocate([PAGE * PAGES], incarnation=fresh_incarnation())
    yield memory
    memory.close()


def engine(memory, *, serves: bool):
    name = fresh_incarnation()
    return open_engine(EngineSpec(module="m", name=name, serves=serves), memory.regions)


def read(reader, peer, count: int) -> Outcome:
    order = np.random.default_rng(4).permutation(PAGES)[:count] * PAGE
    outcome = reader.wait(reader.post(peer, copies(order.tolist(), order.tolist(), [PAGE] * count)), 50.0)
    assert outcome is not None
    return outcome


def test_an_overflowing_batch_proves_nothing_and_destroying_the_engine_ends_it(served, landed, monkeypatch):
    """Reports 33 and 32 (#3793, #4247, #4209): the library refuses the batch and moves a part of it later."""
    monkeypatch.setattr(mooncake_engine, "MAX_DESCRIPTORS", PAGES)
    source, reader = engine(served, serves=True), engine(landed, serves=False)
    outcome = read(reader, reader.connect(source.export(), 5.0), PAGES)
    assert not outcome.proven
    reader.close()
    memory = region_view(landed.regions[0])
    memory[:] = FILL
    time.sleep(WATCH_S)  # nothing to wait for: the point is that nothing comes
    assert (memory == FILL).all()
    source.close()


def test_the_same_read_cut_at_1024_descriptors_is_proven(served, landed):
    """The other half of the report, and its control: only the size of the batch differs."""
    source, reader = engine(served, serves=True), engine(landed, serves=False)
    assert read(reader, reader.connect(source.export(), 5.0), PAGES) == Outcome()
    assert np.array_equal(region_view(landed.regions[0]), region_view(served.regions[0]))
    reader.close()
    source.close()


def test_a_source_that_restarts_on_the_same_host_is_found_again_each_time(served, landed):
    """Report 34 (#863, #2296): no metadata server keeps a stale entry; peers exchange their own."""
    reader = engine(landed, serves=False)
    for _ in range(3):
        source = engine(served, serves=True)
        export = source.export()
        peer = reader.connect(export, 5.0)
        assert read(reader, peer, 64) == Outcome()
        source.close()
        gone = read(reader, peer, 64)
        assert gone.error
        with pytest.raises(TransferFailed, match="does not answer"):
            reader.connect(export, 5.0)
    reader.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("idle_s", [5, 30, 90])
def test_the_first_read_after_an_idle_gap_arrives(served, landed, idle_s):
    """Report 32 (#4209, #3710)."""
    source, reader = engine(served, serves=True), engine(landed, serves=False)
    peer = reader.connect(source.export(), 5.0)
    assert read(reader, peer, 1024) == Outcome()
    time.sleep(idle_s)  # the gap itself
    region_view(landed.regions[0])[:] = FILL
    assert read(reader, peer, 1024).error == ""
    order = np.random.default_rng(4).permutation(PAGES)[:1024]
    ends = [region_view(memory.regions[0]).reshape(PAGES, PAGE)[order] for memory in (served, landed)]
    assert np.array_equal(*ends)
    reader.close()
    source.close()
