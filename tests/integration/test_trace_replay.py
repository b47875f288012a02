"""Live traffic recorded by a gateway process, replayed against it, and a placement explained."""

import asyncio
import json

import httpx

from benchmarks.replay import read, replay
from tests.fakes.cluster import MODEL
from tests.fakes.sim_cluster import body, complete, sim_cluster

SHARED = tuple(range(20, 20 + 64))


async def test_what_was_recorded_is_replayed_with_the_same_lengths_and_reuse(tmp_path):
    recorder = {"recorder.directory": tmp_path}
    async with (
        sim_cluster(tmp_path, "p1", "d1", gateway=recorder) as cluster,
        httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=60) as client,
    ):
        for number in range(4):
            await complete(client, cluster.url, body((*SHARED, *range(number + 1)), max_tokens=3 + number))
        named = await client.post("/v1/completions", json=body(SHARED, stream=False, stream_options=None))
        why = await client.get("/debug/why", params={"request_id": named.json()["id"]})
        assert (await client.get("/debug/why", params={"request_id": "nobody"})).status_code == 404
        written = tmp_path / "gateway-1.jsonl"
        requests = read(await lines(written, 5), vocabulary=250, shrink=1, max_output=100, limit=100)
        tally = await replay(requests, client, model=MODEL, rate=1000.0)
        await lines(written, 10)
    [placement] = why.json()["placements"]
    assert (placement["prefill"], placement["decode"], placement["reason"]) == ("p1", "d1", "prefix")
    assert placement["matched_prefill"] == 64
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    first, again = rows[:5], rows[5:]
    assert sizes(first) == sizes(again) == sorted([*((65 + n, 3 + n) for n in range(4)), (64, 8)])
    for recorded in (first, again):
        assert len({tuple(row["hash_ids"][:4]) for row in recorded}) == 1
    assert (tally.sent, tally.errors, len(tally.ttft)) == (5, [], 5)
    assert tally.prompt_tokens == sum(row["input_length"] for row in first)


def sizes(rows):
    return sorted((row["input_length"], row["output_length"]) for row in rows)


async def lines(path, count):
    """Wait until the file has so many lines; the gateway writes them within its sweep."""
    async with asyncio.timeout(60):
        while path.read_text().count("\n") < count:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    return path
