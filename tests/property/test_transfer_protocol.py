"""Control messages that are lost, doubled, overtaken, renamed or garbage: nobody dies, nothing leaks, nothing wrong commits."""

import asyncio
import random

import pytest

from core.errors import TandemError
from core.handover import (
    Abort,
    Aborted,
    Accept,
    ChunkReady,
    Failed,
    Final,
    Gone,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloReply,
    Prepare,
    Reject,
    Release,
    Released,
    Stale,
)  # fmt: skip
from core.ids import LeaseId, TransferId, fresh_incarnation
from core.kv import PageRef
from tests.fakes.kv_pair import open_pair, quick
from tests.fakes.kv_pools import make_layout, make_request

SEEDS = range(8)


def garbage(rng, names):
    """A well-formed message that makes no sense now; any direction."""
    name = TransferId(rng.choice([*names, "", "unknown", "x" * 5000]))
    pages = tuple(PageRef(rng.randrange(2**32), rng.randrange(2**32)) for _ in range(rng.randrange(4)))
    lease = LeaseId(rng.choice([0, 1, 2, 2**63]))
    to_d = [
        Accept(transfer=name, lease=lease, expires_in_s=-1.0),
        Reject(transfer=TransferId("unknown"), code="?", message="", retry_after_s=-5.0),
        ChunkReady(transfer=TransferId("unknown"), chunk=rng.randrange(2**31), start=5, end=2, pages=pages),
        Final(transfer=TransferId("unknown"), num_tokens=-1, num_chunks=10**9, first_tokens=(), row=-1, row_generation=0),
        Failed(transfer=TransferId("unknown"), code="invariant", message=""),
        Released(transfer=name, valid=True),
        Aborted(transfer=name),
        HeartbeatReply(lost=(LeaseId(2**63),)),
        Gone(transfer=TransferId("unknown")),
        HelloReply(incarnation=fresh_incarnation(), fingerprint=b"", layout=b"?", exports=()),
    ]  # fmt: skip
    to_p = [
        Release(transfer=name, lease=LeaseId(2**63)),
        Release(transfer=TransferId("unknown"), lease=lease),
        Abort(transfer=TransferId("unknown")),
        Heartbeat(leases=(LeaseId(2**63), lease), ttl_s=-1.0),
        Heartbeat(leases=(), ttl_s=float("inf")),
        Prepare(transfer=TransferId("odd"), request=make_request(3), prefix_tokens=-5, lease_ttl_s=-1.0),
    ]
    return to_d, to_p


class Noise:
    """Stands between a local link and the destination."""

    def __init__(self, link, rng, *, drop):
        self._link, self._rng, self._drop = link, rng, drop
        self._late = []
        self._ready = []
        self._names = []

    async def send(self, message):
        if isinstance(message, Prepare):
            self._names.append(message.transfer)
        if not isinstance(message, Hello):
            if self._rng.random() < self._drop:
                return
            if self._rng.random() < 0.2:
                await self._link.send(self._rng.choice(garbage(self._rng, self._names)[1]))
            if self._rng.random() < 0.3:
                await self._link.send(message)
        await self._link.send(message)

    async def receive(self):
        while not self._ready:
            message = await self._link.receive()
            if isinstance(message, HelloReply):
                return message
            if self._rng.random() < self._drop:
                continue
            out = [message] * self._rng.choice([1, 1, 2, 3])
            if self._rng.random() < 0.2:
                out.append(self._rng.choice(garbage(self._rng, self._names)[0]))
            if self._rng.random() < 0.2:
                self._late += out  # overtaken by the next
                continue
            self._ready = out + self._late
            self._late = []
            self._rng.shuffle(self._ready)
        return self._ready.pop()

    async def close(self):
        await self._link.close()


def make_noisy(pair, rng, drop):
    dial = pair.dialer.dial

    async def noisy(address, timeout_s):
        return Noise(await dial(address, timeout_s), rng, drop=drop)

    pair.dialer.dial = noisy
    return dial


async def one_world(seed, directory, drop):
    """Pull through noise; every pull either brings the right bytes or fails with a typed error. Returns successes."""
    rng = random.Random(seed)
    config = quick(
        prepare_timeout_s=0.1, release_timeout_s=0.1, hello_timeout_s=1.0, lease_ttl_s=1.0, breaker_failures=10**6
    )
    layout = make_layout(num_pages=256, num_rows=16)
    good = 0
    async with open_pair("loopback", directory, config=config, source_layout=layout, target_layout=layout) as pair:
        dial = make_noisy(pair, rng, drop)
        requests = [make_request(rng.randrange(1, 150), f"req-{seq}") for seq in range(6)]
        pulls = [pair.pull(r, seq=seq, row=seq, timeout_s=0.5) for seq, r in enumerate(requests)]
        for seq, outcome in enumerate(await asyncio.gather(*pulls, return_exceptions=True)):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, TandemError), repr(outcome)
                assert pair.host.dropped.count(seq) == 1
            else:
                good += 1
                pair.host.assert_landed(seq, requests[seq], row=seq)
                pair.host.release(seq)
        # After the noise: the same destination and source work as if nothing had been.
        pair.dialer.dial = dial
        for link in pair.dialer.links:
            link.cut(None)
        async with asyncio.timeout(30):
            while pair.destination.statistics()["sessions"]:  # noqa: ASYNC110 - until the receivers have noticed
                await asyncio.sleep(0.002)
        await pair.settled()
        request = make_request(100, "after")
        await pair.pull(request, seq=99, row=9)
        pair.host.assert_landed(99, request, row=9)
        pair.host.release(99)
        await pair.settled()
        assert pair.host.is_whole
        assert len(pair.source_host.pool.free) == 255
    return good


@pytest.mark.parametrize("seed", SEEDS)
async def test_lost_messages_fail_pulls_and_nothing_else(seed, tmp_path):
    await one_world(seed, str(tmp_path), drop=0.15)


@pytest.mark.parametrize("seed", SEEDS)
async def test_doubled_overtaken_and_senseless_messages_do_no_harm(seed, tmp_path):
    await one_world(seed, str(tmp_path), drop=0.0)


async def test_pulls_can_succeed_in_the_noise(tmp_path):
    """Negative control: the worlds above are not failures only."""
    assert sum([await one_world(seed, str(tmp_path), drop=0.0) for seed in (100, 101, 102)]) > 0


async def test_a_receiver_survives_a_message_that_breaks_its_handler(tmp_path, caplog):
    async with open_pair("loopback", str(tmp_path), computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(16)))
        prefill = await pair.source_host.started.get()
        pair.dialer.links[0]._to_d.put_nowait(object())
        pair.source_host.compute(prefill, 16)
        pair.source_host.finish(prefill)
        await pulling
    assert "was not understood" in caplog.text


async def test_a_restart_in_mid_noise_is_a_lost_worker(tmp_path):
    async with open_pair("loopback", str(tmp_path), computing=False) as pair:
        pulls = [asyncio.create_task(pair.pull(make_request(16, f"r{i}"), seq=i)) for i in range(3)]
        for _ in pulls:
            await pair.source_host.started.get()
        pair.dialer.links[0]._to_d.put_nowait(Stale(incarnation=fresh_incarnation()))
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        assert [getattr(outcome, "code", outcome) for outcome in outcomes] == ["worker_lost"] * 3
