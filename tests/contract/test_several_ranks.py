"""A destination whose heads lie at two source ranks: both are read over real transports, and every byte is where it belongs.

The data path of unequal tensor parallelism. Sessions, which carry the messages, are with one source each.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from core.clock import SystemClock
from core.errors import LayoutMismatch, LeaseLost
from core.ids import Incarnation, TransferId, fresh_incarnation
from core.kv import ComponentKind
from kv_transfer.api import PeerInfo
from kv_transfer.config import TransferConfig
from kv_transfer.factory import TransportFactory
from kv_transfer.handshake import check_layouts
from kv_transfer.lease import LeaseTable
from kv_transfer.memory import allocate, region_view
from kv_transfer.plan import Span, plan_pages, plan_rows
from kv_transfer.reader import Reader, ReadGroup
from kv_transfer.settings import TransportSettings
from kv_transfer.shards import assign
from tests.fakes.kv_ranks import filled, layout, memory, own_bytes, record

HEADS, MAX = 4, 1 << 20
SOURCE_PAGES, SOURCE_ROW = [5, 2, 3], 1
TARGET_PAGES, TARGET_ROW = [0, 4, 5], 2
SPAN = Span(0, 12, SOURCE_PAGES), Span(0, 12, TARGET_PAGES)


class Owner:
    def prove(self, pages):
        raise AssertionError("nothing was without proof")


class Rank:
    """One source rank: its own process of the world, but for the process."""

    def __init__(self, transport: str, directory: str, rank: int, ranks: int, stack: ExitStack) -> None:
        self.layout = layout(ranks, rank, HEADS, "HND")
        held, incarnation = filled(self.layout, HEADS), fresh_incarnation()
        pool = allocate([len(held[i]) for i in sorted(held)], incarnation=incarnation, directory=directory)
        stack.callback(pool.close)
        for region in pool.regions:
            region_view(region)[:] = held[region.id]
        self.leases = LeaseTable(layout=self.layout, clock=SystemClock(), max_per_peer=9, orphan_ttl_s=60.0)
        self.lease, _ = self.leases.grant(Incarnation("d"), TransferId("t"), 60.0)
        self.leases.extend(self.lease, SOURCE_PAGES)
        self.leases.cover_row(self.lease, SOURCE_ROW)
        settings = TransportSettings(incarnation, TransferConfig(segment_directory=directory))
        served = TransportFactory(settings, pool.regions, SystemClock()).open(transport, self.leases, lambda: None)
        stack.callback(served.destroy)
        self.info: PeerInfo = served.export()


@pytest.fixture(params=["shm", "tcp"])
def world(request, tmp_path):
    """Two ranks of two as sources, one of one as the destination."""
    with ExitStack() as stack:
        ranks = [Rank(request.param, str(tmp_path), rank, 2, stack) for rank in (0, 1)]
        ours = layout(1, 0, HEADS, "NHD")
        empty = memory(ours)
        pool = allocate([len(empty[i]) for i in sorted(empty)], incarnation=fresh_incarnation())
        stack.callback(pool.close)
        config = TransferConfig(segment_directory=str(tmp_path))
        opener = TransportFactory(TransportSettings(fresh_incarnation(), config), pool.regions, SystemClock())
        yield SimpleNamespace(
            transport=request.param, ranks=ranks, layout=ours, pool=pool, opener=opener, config=config
        )


async def hand_over(world) -> list[Exception]:
    """Read all that the destination needs of both ranks; returns the failures it was told of."""
    reader = Reader(world.transport, world.opener, world.config, SystemClock(), ())
    failures: list[Exception] = []
    try:
        takes = assign([rank.layout for rank in world.ranks], world.layout, 0)
        groups = []
        for rank, take in zip(world.ranks, takes, strict=True):
            assert "kv" in take, "both ranks are needed"
            peer = reader.transport.connect(rank.info, 5.0)
            copies = plan_pages(rank.layout, world.layout, *SPAN, MAX, take=take)
            copies += plan_rows(rank.layout, world.layout, SOURCE_ROW, TARGET_ROW, MAX, take=take)
            group = ReadGroup(TransferId("t"), rank.lease, tuple(TARGET_PAGES), Owner(), failures.append, lambda: None)
            await reader.post(peer, copies, group)
            groups.append(group)
        async with asyncio.timeout(30):
            for group in groups:
                await reader.landed(group)
    finally:
        await reader.destroy()
    return failures


async def test_the_heads_of_two_ranks_become_the_records_of_one(world):
    assert await hand_over(world) == []
    regions = {region.id: region_view(region) for region in world.pool.regions}
    for component in world.layout.components:
        paged = component.kind is ComponentKind.PAGED
        places = zip(SOURCE_PAGES, TARGET_PAGES, strict=True) if paged else [(SOURCE_ROW, TARGET_ROW)]
        for theirs, ours in places:
            assert np.array_equal(record(component, regions, ours), own_bytes(component, HEADS, theirs)), component.name


@pytest.mark.parametrize("world", ["tcp"], indirect=True)
async def test_the_refusal_of_one_rank_is_told_to_the_whole_hand_over(world):
    """Over tcp, where a source is asked; mapped pages cannot refuse, their source's RELEASED does."""
    world.ranks[1].leases.end(world.ranks[1].lease)
    failures = await hand_over(world)
    assert failures
    assert all(isinstance(failure, LeaseLost) for failure in failures)


def test_a_session_with_one_of_two_ranks_is_refused_by_name():
    """What would be needed for one session over several ranks is not there, and is not taken for granted."""
    with pytest.raises(LayoutMismatch, match="kv"):
        check_layouts(layout(2, 0, HEADS, "HND"), layout(1, 0, HEADS, "HND"))
