"""Whole hand-overs between a source and a destination in one process, over every embedded transport."""

import pytest

from tests.fakes.kv_pair import open_pair
from tests.fakes.kv_pools import make_request

TRANSPORTS = ["loopback", "shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_pull_brings_every_page_and_the_row(transport, tmp_path):
    async with open_pair(transport, str(tmp_path)) as pair:
        request = make_request(200)
        pulled = await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)
        assert pulled.num_tokens == 200
        assert pulled.chunks == 4
        assert pulled.first.tokens == (777,)
        assert pair.firsts == [pulled.first]
        assert pulled.bytes_pulled == 13 * (1024 + 96) + 160 + 48
        assert pair.source.statistics()["bytes_handed_over"] == pulled.bytes_pulled
        await pair.settled()
        assert pair.host.dropped == []
