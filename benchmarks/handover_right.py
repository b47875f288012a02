"""Hand-overs between GPUs give the words of one worker, and a death in the middle of one costs nothing but time."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence

from benchmarks import handover_load as load
from benchmarks.handover_bench import Bench, pair_name
from benchmarks.handover_cluster import Answer, Cluster, ask, body_of

TOKENS_S = 120.0
"""For one model."""


TROUBLE = ("transfer_pulls_failed", "transfer_leases_lost", "transfer_breakers_open", "transfer_digest_failures")


def prompts(model: str, count: int) -> list[list[int]]:
    """Return prompts of several lengths; ids that every vocabulary has as plain text."""
    rng, longest = random.Random(11), 3000 if model == "tiny-llama" else 1500
    lengths = [17, 64, 255, 256, 257, 700, longest]
    return [[rng.randrange(33, 126) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


async def tokens(bench: Bench) -> object:
    """The same requests to a pair over each transport and to one worker: the tokens must be equal."""
    found: dict[str, dict[str, object]] = {}
    for model in bench.options.models:
        try:
            async with asyncio.timeout(TOKENS_S):
                rows = found[model] = dict[str, object]()
                bench.note("tokens", found)
                await _tokens_of(bench, model, rows)
        except (RuntimeError, OSError, ValueError, KeyError, TimeoutError) as error:
            found[model]["failed"] = f"{type(error).__name__}: {error}"[-3000:]
            print(model, found[model], flush=True)
    return found


async def _tokens_of(bench: Bench, model: str, rows: dict[str, object]) -> None:
    asked = [body_of(model, prompt, 48) for prompt in prompts(model, 14)]
    truth = await _answers(await bench.serving(f"{model}-alone"), asked)
    for way in bench.options.transports:
        name, transport = pair_name(model, way), way.partition("@")[0]
        cluster = await bench.serving(name)
        began = time.monotonic()
        answers = await _answers(cluster, asked)
        settled = await cluster.settled()
        decode = settled["decode-1"]
        rows[name] = {
            **_compared(answers, truth),
            "seconds": round(time.monotonic() - began, 2),
            "bytes_pulled": decode.get("transfer_bytes_pulled", 0.0),
            "pulls": decode.get("transfer_pulls_committed", 0.0),
            f"bytes_landed_{transport}": decode.get(f"transfer_bytes_landed_{transport}", 0.0),
            "recomputed_tokens": decode.get("engine_recomputed_tokens"),
            "recovered_here": decode.get("worker_recovered_here_total", 0.0),
            "failed": {n: v for n, v in decode.items() if v and n in TROUBLE},
            "ready": [line for line in cluster.grep("ready after") if "worker" not in line],
            "memory": [
                line.split("capacity: ")[-1].strip(' "}') for line in cluster.grep("capacity: ") if "GiB" in line
            ],
        }
        print(name, rows[name], flush=True)
        bench.note("tokens", bench.result["tokens"])


async def _answers(cluster: Cluster, asked: Sequence[dict[str, object]]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(cluster.address, body) for body in asked)))


def _compared(answers: Sequence[Answer], truth: Sequence[Answer]) -> dict[str, object]:
    pairs = list(zip(answers, truth, strict=True))
    return {
        "requests": len(pairs),
        "equal_tokens": sum(bool(t.tokens) and a.tokens == t.tokens and not a.error for a, t in pairs),
        "equal_logprobs": sum(bool(t.tokens) and a.logprobs == t.logprobs for a, t in pairs),
        "wrong_tokens": sum(x != y for a, t in pairs for x, y in zip(a.tokens, t.tokens, strict=False)),
        "compared_tokens": sum(min(len(a.tokens), len(t.tokens)) for a, t in pairs),
        "errors": sorted({answer.error for answer in (*answers, *truth) if answer.error})[:4],
        "tokens": sum(len(t.tokens) for t in truth),
    }


async def kill(bench: Bench) -> object:
    """``kill -9`` of the prefill worker while prompts are computed and pulled; then the same after its restart."""
    model = bench.options.models[0]
    alone = await bench.serving(f"{model}-alone")
    pair = await bench.serving(pair_name(model, bench.options.transports[0]))
    for cluster in bench.clusters.values():  # their memory must not grow while ours is watched
        with contextlib.suppress(RuntimeError):
            await bench.serving(cluster.name)
    rng = random.Random(5)
    asked = [body_of(model, [rng.randrange(33, 126) for _ in range(1500)], 24) for _ in range(32)]
    truth = await _answers(alone, asked)
    before, used = await pair.settled(), used_bytes(bench)
    sent = [asyncio.create_task(ask(pair.address, body)) for body in asked]
    end = time.monotonic() + 20
    while time.monotonic() < end:
        now = (await pair.statistics())["decode-1"]
        if now["transfer_bytes_pulled"] > before["decode-1"]["transfer_bytes_pulled"] or now["transfer_open_ops"]:
            break
    at_kill = (await pair.statistics())["decode-1"]
    unanswered = sum(not task.done() for task in sent)
    pair.kill("prefill-1")
    answers = list(await asyncio.gather(*sent))
    await pair.ready_again("prefill-1", 90)
    again = await _answers(pair, [body_of(model, [*body["prompt"], 40], 24) for body in asked[:4]])
    check = await _answers(alone, [body_of(model, [*body["prompt"], 40], 24) for body in asked[:4]])
    after = await pair.settled()
    done_before = at_kill["transfer_pulls_committed"] - before["decode-1"]["transfer_pulls_committed"]
    return {
        "pulls_committed_before_the_kill": done_before,
        "requests_unanswered_at_the_kill": unanswered,
        "leases_or_ops_open_at_the_kill": {n: at_kill.get(n) for n in ("transfer_open_ops", "transfer_sessions")},
        "answers": _compared(answers, truth),
        "after_restart": _compared(again, check),
        "left_over": {w: {n: v for n, v in s.items() if n.startswith("engine_pages_")} for w, s in after.items()},
        "gpu_bytes_used": {"before": used, "after": used_bytes(bench)},
    }


async def kill_large(bench: Bench) -> object:
    """``kill -9`` of the prefill worker when the first token of a long prompt came, of which nothing was read before.

    Its memory is mapped by the decode worker, whose copies are under way: they must neither fail the device nor be believed.
    """
    pair = await bench.serving("large-end")
    before = (await pair.settled())["decode-1"]
    rng, pid = random.Random(6), pair.pid("prefill-1")
    killed: list[float] = []

    def at_first() -> None:
        if not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(time.perf_counter())

    bodies = [body_of(pair.model, load.prompt_of(rng, max(bench.options.lengths)), 24) for _ in range(2)]
    answers = await asyncio.gather(*(ask(pair.address, body, on_first=at_first) for body in bodies))
    after = (await pair.settled())["decode-1"]
    restarts = {str(p["id"]): p["restarts"] for p in pair.status()["processes"] if p["role"] == "decode"}
    names = (
        "transfer_pulls_committed",
        "transfer_pulls_failed",
        "transfer_bytes_pulled",
        "worker_recovered_here_total",
    )
    return {
        "killed": bool(killed),
        "answers_whole": sum(len(a.tokens) == 24 and not a.error for a in answers),
        "of": len(answers),
        "errors": sorted({a.error for a in answers if a.error}),
        "counted": {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names},
        "restarts_of_decode": restarts,
        "left_over": {n: v for n, v in after.items() if n.startswith("engine_pages_")},
    }


def used_bytes(bench: Bench) -> list[int]:
    """Return the bytes in use on each GPU, by all processes; empty without one."""
    if bench.options.device == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [
        int(line) << 20 for line in subprocess.run(query, check=False, capture_output=True, text=True).stdout.split()
    ]
