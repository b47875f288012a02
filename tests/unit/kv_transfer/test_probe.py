"""A connection is used only after a read through it brought the right bytes; a damaged description reaches no backend."""

import asyncio

import numpy as np
import pytest

from core.errors import TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.memory import region_view
from kv_transfer.probe import PROBE_BYTES, probe_bytes, seal, unseal
from tests.fakes.kv_pair import open_pair, quick
from tests.fakes.kv_pools import make_request

over_each = pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])


@over_each
async def test_a_connection_that_brings_the_bytes_of_somebody_else_is_not_used(transport, tmp_path):
    async with open_pair(transport, str(tmp_path)) as pair:
        page = region_view(pair.source._probe.region)
        page[:] = np.frombuffer(probe_bytes(fresh_incarnation()), np.uint8)
        with pytest.raises(TransferFailed, match="not those of the worker"):
            await pair.pull(make_request(40))
        assert pair.host.dropped == [1]
        page[:] = np.frombuffer(probe_bytes(pair.source._desk.identity.incarnation), np.uint8)
        await pair.pull(make_request(40, "req-2"), seq=2)
        assert pair.destination.statistics()["sessions"] == 1


@over_each
async def test_a_breaker_that_is_half_open_makes_one_verified_read(transport, tmp_path):
    config = quick(breaker_failures=1, breaker_min_s=0.05)
    async with open_pair(transport, str(tmp_path), config=config) as pair:
        page = region_view(pair.source._probe.region)
        good, page[7] = page.copy(), ~page[7]
        with pytest.raises(TransferFailed):
            await pair.pull(make_request(40))
        assert pair.destination.statistics()["breakers_open"] == 1
        page[:] = good
        await asyncio.sleep(0.1)
        first = await asyncio.gather(
            *(pair.pull(make_request(40, f"req-{seq}"), seq=seq) for seq in (2, 3)), return_exceptions=True
        )
        refused = [error for error in first if isinstance(error, Exception)]
        assert [error.code for error in refused] == ["no_capacity"], "exactly one trial goes through"
        assert pair.destination.statistics()["breakers_open"] == 0


def test_a_damaged_description_is_found():
    blob = b"some blob"
    sealed = seal(blob, 3)
    assert unseal(sealed).blob == blob
    for at in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 0x10
        try:
            found = unseal(bytes(damaged))
        except TransferFailed:
            continue
        assert found.blob == blob, "only the number of the probe region may have changed"
    for cut in range(len(sealed)):
        with pytest.raises(TransferFailed):
            unseal(sealed[:cut])


def test_the_page_has_the_size_that_its_readers_ask_for():
    assert len(probe_bytes(fresh_incarnation())) == PROBE_BYTES
