"""What a hand-over between GPUs takes: tokens of one request alone, the stages behind them, and under open-loop load."""

import asyncio
import json
import random
import re
import statistics
import urllib.request
from collections.abc import Sequence

from benchmarks import handover_load as load
from benchmarks.handover_bench import Bench
from benchmarks.handover_cluster import Answer, Cluster, ask, body_of

STAGE_LENGTHS, STAGE_ASKS = (1024, 8192), 8
STREAM_TOKENS = 500
ROUNDS = 3


async def overlap(bench: Bench) -> object:
    """Time to the first and second token, one request at a time, the same prompts to each cluster in turn."""
    names = ("large-chunks", "large-end", "large-alone")
    clusters = {name: await bench.serving(name) for name in names}
    rng, rows = random.Random(3), dict[str, object]()
    for cluster in clusters.values():  # compiles, connects
        for length in (64, max(bench.options.lengths)):
            print(
                cluster.name, (await ask(cluster.address, body_of(cluster.model, load.prompt_of(rng, length), 3))).error
            )
    for length in bench.options.lengths:
        seen: dict[str, list[Answer]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            prompt = load.prompt_of(rng, length)
            for name in names[:: 1 if turn % 2 else -1]:
                seen[name].append(await ask(clusters[name].address, body_of(clusters[name].model, prompt, 4)))
        rows[str(length)] = {name: _times(answers) for name, answers in seen.items()}
        print(length, rows[str(length)], flush=True)
        bench.note("overlap", {"rounds": ROUNDS, "by_prompt_tokens": rows})
    pulled = {name: _pull_facts(await clusters[name].statistics()) for name in names[:2]}
    return {"rounds": ROUNDS, "by_prompt_tokens": rows, "pulled": pulled}


def _times(answers: Sequence[Answer]) -> dict[str, object]:
    good = [a for a in answers if len(a.times) > 2]
    if not good:
        return {"failed": [a.error for a in answers]}
    return {
        "first_ms": [round(1e3 * a.times[0], 2) for a in good],
        "second_ms": [round(1e3 * a.times[1], 2) for a in good],
        "median_second_after_first_ms": round(1e3 * statistics.median(a.times[1] - a.times[0] for a in good), 2),
        "median_third_after_second_ms": round(1e3 * statistics.median(a.times[2] - a.times[1] for a in good), 2),
    }


def _pull_facts(found: dict[str, dict[str, float]]) -> dict[str, float]:
    wanted = (
        "transfer_bytes_pulled",
        "transfer_bytes_landed_cuda-ipc",
        "transfer_pulls_committed",
        "transfer_chunks",
        "transfer_reading_s",
        "transfer_reads_cuda-ipc",
        "transfer_records_cuda-ipc",
    )
    return {name: found["decode-1"].get(name, 0.0) for name in wanted}


async def timeline(bench: Bench) -> object:
    """From the first token to the second, by stages: alone on an idle decode worker, and beside another stream there."""
    rows: dict[str, object] = {}
    rng = random.Random(7)  # no prompt twice: it would be in the cache
    for name in ("large-chunks", "large-alone"):
        cluster = await bench.serving(name)
        for length in STAGE_LENGTHS:
            rows[f"{name}, {length} tokens, idle"] = await _stages(cluster, length, rng)
            other = asyncio.create_task(ask(cluster.address, body_of(cluster.model, [1000] * 64, STREAM_TOKENS)))
            await asyncio.sleep(0.2)
            beside = await _stages(cluster, length, rng)
            gaps_ms = {"gaps_of_the_stream_ms": load.spread((await other).gaps)}
            rows[f"{name}, {length} tokens, beside a stream"] = beside | gaps_ms
            bench.note("timeline", rows)
    print(json.dumps(rows), flush=True)
    return rows


async def _stages(cluster: Cluster, length: int, rng: random.Random) -> dict[str, object]:
    bodies = [body_of(cluster.model, load.prompt_of(rng, length), 6) for _ in range(STAGE_ASKS)]
    before = await asyncio.to_thread(_stage_seconds, cluster)
    answers = [await ask(cluster.address, body) for body in bodies]
    after = await asyncio.to_thread(_stage_seconds, cluster)
    spent = {f"{n}_ms": round(1e3 * (after[n] - before.get(n, 0.0)) / len(bodies), 3) for n in after}
    return {**_times(answers), "mean_of_stages": spent}


def _stage_seconds(cluster: Cluster) -> dict[str, float]:
    """Return the seconds that all pulls of the decode workers have spent in each stage."""
    found: dict[str, float] = {}
    for process in cluster.status()["processes"]:
        if process["role"] != "decode":
            continue
        with urllib.request.urlopen(f"http://{process['http_address']}/metrics", timeout=5) as page:
            text = page.read().decode()
        for labels, value in re.findall(r"^tandem_transfer_stage_seconds_sum{(.*)} (\S+)$", text, re.MULTILINE):
            stage = re.search(r'stage="(\w+)"', labels)
            if stage is not None and float(value):
                found[stage[1]] = found.get(stage[1], 0.0) + float(value)
    return found


async def measure_load(bench: Bench) -> object:
    """The same open-loop arrivals, of growing rates, to one prefill and one decode worker, and to two that do both."""
    rows: dict[str, object] = {}
    names = ("large-chunks", "large-alone")
    for name in names:  # compiles what these sizes need, on every worker
        await load.run(await bench.serving(name), load.MIXES["mixed"], 3.0, seed=1)
    for mix, kinds in load.MIXES.items():
        rows[mix] = row = dict[str, object]()
        seconds = bench.options.load_s * load.SHARES[mix]
        for factor in load.FACTORS:
            faster = load.scaled(kinds, factor)
            row[f"x{factor:g}"] = each = dict[str, object]()
            for name in names:
                each[name] = await load.run(await bench.serving(name), faster, seconds, seed=2)
                print(mix, factor, name, json.dumps(each[name]), flush=True)
        bench.note("load", rows)
    return rows
