"""Clients that leave at any moment, workers that come and go meanwhile: in the end nothing is held, and memory is flat."""

import asyncio
import contextlib
import json
import random
import signal

import httpx
import psutil
import pytest

from tests.fakes.sim_cluster import body, complete, sim_cluster

pytestmark = [pytest.mark.cluster]

ABORTS = 1000
STEP_S = 0.005
HELD = ("request", "queued", "permit", "attempt")


async def leave_at_random(url, rng):
    """Ask, read for a random time or not at all, and go without a word."""
    host, _, port = url.removeprefix("http://").partition(":")
    payload = json.dumps(body((rng.randrange(3, 300), 5), max_tokens=rng.randrange(1, 40))).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    whole = head.encode() + payload
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        # Within the headers, within the body, or after all was sent.
        cut = rng.choice((rng.randrange(1, len(head)), rng.randrange(len(head), len(whole)), len(whole), len(whole)))
        writer.write(whole[:cut])
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(rng.choice((0.0, 0.005, 0.03, 0.1)) * rng.random()):
                await reader.read()
        if rng.random() < 0.3:
            writer.transport.abort()  # a reset instead of a FIN
    finally:
        writer.close()


async def nothing_held(cluster):
    """One reading in which nothing is held; until then a request of a client that left may still come in and end."""
    names = (*(f"leases_{kind}" for kind in HELD), "in_flight", "queued", "open_handles", "own_requests", "own_tokens")
    async with asyncio.timeout(30):
        while True:
            values = await cluster.statistics("gateway-1")
            if not any(values[name] for name in names):
                break
            await asyncio.sleep(0.02)
    audit = await cluster.admin.statistics(cluster.gateway.facts["membership_address"], audit=True)
    assert audit.audit_findings == ()


async def test_a_thousand_aborts_leave_nothing_behind_and_memory_is_flat(tmp_path):
    rng = random.Random(3)
    gateway = {"limits.max_in_flight": 24, "access.log": "false"}
    async with sim_cluster(tmp_path, "p1", "d1", "d2", gateway=gateway, step_s=STEP_S) as cluster:
        process = psutil.Process(cluster.gateway.process.pid)

        async def storm(number):
            gate = asyncio.Semaphore(48)

            async def one():
                async with gate:
                    await leave_at_random(cluster.url, rng)

            await asyncio.gather(*(one() for _ in range(number)))
            await nothing_held(cluster)
            return process.memory_info().rss

        warm = await storm(ABORTS // 2)
        grown = await storm(ABORTS // 2) - warm
        assert grown < 4 << 20, f"{grown} bytes more after {ABORTS // 2} more aborts"
        for name in ("d1", "d2"):
            await cluster.settled(name, "running", 0)

        # The same while a worker dies and comes back (reports 2 and 3).
        dying = asyncio.create_task(cluster.children["d1"].kill(signal.SIGKILL))
        await asyncio.gather(*(leave_at_random(cluster.url, rng) for _ in range(100)), dying)
        await cluster.start_workers("d1", step_s=STEP_S)
        await nothing_held(cluster)


async def test_the_leak_test_sees_a_request_that_is_held(tmp_path):
    """Negative control, and a look at /debug/leases: what is held shows with its owner and age."""
    async with (
        sim_cluster(tmp_path, "p1", "d1", step_s=0.05) as cluster,
        httpx.AsyncClient(timeout=30, trust_env=False) as client,
    ):
        running = asyncio.create_task(complete(client, cluster.url, body(max_tokens=1000)))
        await cluster.settled("gateway-1", "leases_attempt", 1)
        with pytest.raises((AssertionError, TimeoutError)):
            async with asyncio.timeout(0.2):
                await nothing_held(cluster)
        told = (await client.get(f"{cluster.url}/debug/leases")).json()
        oldest = {each["kind"]: each for each in told["oldest"]}
        assert "d1" in oldest["attempt"]["owner"]
        assert oldest["permit"]["age_s"] > 0
        running.cancel()
        await nothing_held(cluster)
