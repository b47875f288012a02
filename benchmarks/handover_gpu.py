"""Prefill and decode workers on GPUs, by `tandem up`: same tokens as one worker, what moves, how fast, and what a death costs.

    python -m benchmarks.handover_gpu --out DIR [--gpus 1|2] [--models tiny-llama v41-tiny] [--commit HASH] [--parts ...]

Parts: `link` (each way between two processes beside a plain copy), `table` (a gather and expert products, half a peer's), `tokens`
(equal to one worker's), `overlap` (first and second token with pulls chunk by chunk and at the end), `load` (1P1D against two
workers that do both), `kill` (-9, of a prefill worker). All clusters are started side by side, then asked in turn. Goes on
after a failure, prints everything, and writes the record again after each part.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import handover_load as load
from benchmarks import handover_table
from benchmarks.handover_cluster import Answer, Cluster, ask, body_of
from benchmarks.record import write_record

LARGE = "llama-8b-random"
START_S = 170.0
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
ROUNDS = 3
LOAD_S = 10.0
LARGE_PAGES = {1: 768, 2: 1536}
"""By GPUs: all clusters are there at once."""
LARGE_SETS = (
    "engine.page_tokens=64",
    "engine.num_rows=64",
    "engine.chunk_tokens=2048",
    "engine.deterministic=false",
    "engine.graphs.tiers=[1,4,16,32]",
)
SMALL_SETS = ("engine.num_pages=2048", "engine.chunk_tokens=256", "transfer.digests=true")


@dataclass(slots=True)
class Bench:
    """What all parts share."""

    options: argparse.Namespace
    directory: Path
    clusters: dict[str, Cluster] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, str]:
        """Of prefill and decode workers."""
        device = str(self.options.device)
        return (device, device) if self.options.gpus == 1 else (f"{device}:0", f"{device}:1")

    def pair(self, model: str, name: str, sets: Sequence[str], *more: str) -> None:
        """Start one prefill and one decode worker of a model."""
        prefill, decode = self.devices
        places = ("--set", f"prefill:model.device={prefill}", "--set", f"decode:model.device={decode}")
        self._start(name, model, ("--prefill", "1", "--decode", "1", *places, *_sets(sets), *more))

    def alone(self, model: str, name: str, sets: Sequence[str], workers: int = 1) -> None:
        """Start workers that compute whole requests, on one GPU each."""
        description = self.directory / f"{name}.yaml"
        devices = list(dict.fromkeys(self.devices))[:workers]
        body = (
            f"prefill: {{replicas: 0, minimum: 0}}\ndecode: {{replicas: {workers}, devices: {json.dumps(devices)}}}\n"
        )
        description.write_text(body + "prefill_mode: local\n")
        self._start(name, model, ("-f", str(description), *_sets(sets)))

    def _start(self, name: str, model: str, flags: Sequence[str]) -> None:
        cluster = Cluster(name, model, flags, self.directory / name)
        cluster.start()
        self.clusters[name] = cluster

    def serving(self, name: str) -> Cluster:
        """Return a cluster once it serves."""
        cluster = self.clusters[name]
        if not cluster.address:
            cluster.wait(cluster.began + START_S)
        return cluster


def _sets(sets: Sequence[str]) -> list[str]:
    return [part for value in sets for part in ("--set", f"all:{value}")]


def start(bench: Bench, parts: Sequence[str]) -> None:
    """Start what the parts need."""
    large = LARGE if not bench.options.large else str(bench.options.large)
    sets = (*LARGE_SETS, f"engine.num_pages={LARGE_PAGES[bench.options.gpus]}")
    if {"overlap", "load"} & set(parts):
        bench.pair(large, "large-chunks", sets)
        if "overlap" in parts:
            bench.pair(large, "large-end", sets, "--set", "decode:transfer.pull_chunks=false")
        bench.alone(large, "large-alone", sets, workers=bench.options.gpus)
    for model in bench.options.models if {"tokens", "kill"} & set(parts) else ():
        bench.pair(model, f"{model}-pair", SMALL_SETS)
        bench.alone(model, f"{model}-alone", SMALL_SETS)
        if "tokens" in parts:
            bench.pair(model, f"{model}-tcp", SMALL_SETS, "--transfer", "tcp")


async def link(bench: Bench) -> object:
    """Each transport between two processes, beside a plain copy from device to device, for each target."""
    return {f"cuda:0 to cuda:{target}": await _link_to(bench, target) for target in range(bench.options.gpus)}


async def _link_to(bench: Bench, target: int) -> object:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks.transfer_gpu", "--out", out, "--target-device", str(target)]
        command += ["--transports", "cuda-ipc", "tcp", "--commit", "x", *bench.options.link]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=90)
        path = Path(out) / "transfer_gpu.json"
        if not path.exists():
            raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
        return json.loads(path.read_text())["result"]


async def table(bench: Bench) -> object:
    """A gather and a grouped product through tables of addresses, half of which are the other GPU's."""
    peer = bench.options.gpus - 1
    gathered = await asyncio.to_thread(handover_table.gather, peer)
    return gathered | {"experts": await asyncio.to_thread(handover_table.products, peer)}


def prompts(model: str, count: int) -> list[list[int]]:
    """Return prompts of several lengths; ids that every vocabulary has as plain text."""
    rng, longest = random.Random(11), 3000 if model == "tiny-llama" else 1500
    lengths = [17, 64, 255, 256, 257, 700, longest]
    return [[rng.randrange(33, 126) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


async def tokens(bench: Bench) -> object:
    """The same requests to a pair over each transport and to one worker: the tokens must be equal."""
    found: dict[str, object] = {}
    for model in bench.options.models:
        try:
            found[model] = await _tokens_of(bench, model)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            found[model] = {"failed": str(error)[-3000:]}
            print(found[model], flush=True)
    return found


async def _tokens_of(bench: Bench, model: str) -> object:
    asked = [body_of(model, prompt, 48) for prompt in prompts(model, 14)]
    truth = await _answers(bench.serving(f"{model}-alone"), asked)
    rows: dict[str, object] = {}
    for name, transport in ((f"{model}-pair", "cuda-ipc"), (f"{model}-tcp", "tcp")):
        cluster = bench.serving(name)
        answers = await _answers(cluster, asked)
        settled = await cluster.settled()
        decode = settled["decode-1"]
        rows[name] = {
            **_compared(answers, truth),
            "bytes_pulled": decode.get("transfer_bytes_pulled", 0.0),
            f"bytes_landed_{transport}": decode.get(f"transfer_bytes_landed_{transport}", 0.0),
            "recomputed_tokens": decode.get("engine_recomputed_tokens"),
            "ready": [line for line in cluster.grep("ready after") if "worker" not in line],
            "memory": [
                line.split("capacity: ")[-1].strip(' "}') for line in cluster.grep("capacity: ") if "GiB" in line
            ],
        }
        print(name, rows[name], flush=True)
    return rows


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
    alone, pair = bench.serving(f"{model}-alone"), bench.serving(f"{model}-pair")
    for cluster in bench.clusters.values():  # their memory must not grow while ours is watched
        with contextlib.suppress(RuntimeError):
            bench.serving(cluster.name)
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


def used_bytes(bench: Bench) -> list[int]:
    """Return the bytes in use on each GPU, by all processes; empty without one."""
    if bench.options.device == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [
        int(line) << 20 for line in subprocess.run(query, check=False, capture_output=True, text=True).stdout.split()
    ]


async def overlap(bench: Bench) -> object:
    """Time to the first and second token, one request at a time, the same prompts to each cluster in turn."""
    names = ("large-chunks", "large-end", "large-alone")
    clusters = {name: bench.serving(name) for name in names}
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
    wanted = ("transfer_bytes_pulled", "transfer_bytes_landed_cuda-ipc", "transfer_pulls_committed", "transfer_chunks")
    return {name: found["decode-1"].get(name, 0.0) for name in wanted}


async def measure_load(bench: Bench) -> object:
    """The same open-loop arrivals to one prefill and one decode worker, and to two workers that do both."""
    rows: dict[str, object] = {}
    names = ("large-chunks", "large-alone")
    for name in names:  # compiles what these sizes need, on every worker
        await load.run(bench.serving(name), load.MIXES["mixed"], 3.0, seed=1)
    for mix, kinds in load.MIXES.items():
        rows[mix] = row = {}
        for name in names:
            cluster = bench.serving(name)
            await load.run(cluster, kinds, 1.0, seed=1)
            row[name] = await load.run(cluster, kinds, bench.options.load_s, seed=2)
            print(mix, name, json.dumps(row[name]), flush=True)
    return rows


PARTS: dict[str, Callable[[Bench], Awaitable[object]]] = {
    "link": link,
    "table": table,
    "tokens": tokens,
    "overlap": overlap,
    "load": measure_load,
    "kill": kill,
}


async def run(bench: Bench) -> bool:
    """Run the parts that were asked for; True if none failed."""
    result: dict[str, object] = {"gpus": bench.options.gpus, "devices": bench.devices}
    good, began = True, time.monotonic()
    start(bench, bench.options.parts)
    try:
        for name in bench.options.parts:
            since = time.monotonic()
            try:
                result[name] = await PARTS[name](bench)
            except Exception:  # noqa: BLE001 - one part's failure must not cost the others' run
                good, told = False, traceback.format_exc()[-4000:]
                result[name] = {"failed": told}
                print(told, flush=True)
            print(f"part {name}: {time.monotonic() - since:.1f} s, {time.monotonic() - began:.1f} s in all", flush=True)
            name = f"handover_h200_x{bench.options.gpus}"
            write_record(
                name, result, note=bench.options.note, directory=bench.options.out, commit_run=bench.options.commit
            )
    finally:
        stops = [asyncio.to_thread(cluster.stop) for cluster in bench.clusters.values()]
        await asyncio.gather(*stops, return_exceptions=True)
        for cluster in bench.clusters.values():
            bad = [line for line in cluster.grep("") if " WARNING " in line or " ERROR " in line or "Traceback" in line]
            told = [
                line for line in cluster.grep("ready after") + cluster.grep("recorded") if "decode steps of" not in line
            ]
            print(f"== {cluster.name}:", *[line[-160:] for line in told], *bad[:8], sep="\n  ", flush=True)
            if not cluster.address:
                print(cluster.last_lines(), flush=True)
    return good


def _leave(signum: int, frame: object) -> None:
    del signum, frame
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--device", default="cuda", help="cpu: try the script itself")
    parser.add_argument("--models", nargs="*", default=["tiny-llama", "v41-tiny"])
    parser.add_argument("--large", default="", help=f"instead of {LARGE}")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--load-s", type=float, default=LOAD_S)
    parser.add_argument("--link", nargs="*", default=[], help="further arguments of benchmarks.transfer_gpu")
    parser.add_argument("--commit", default="")
    parser.add_argument("--note", default="")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)  # the clusters end with us
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as directory:
        return 0 if asyncio.run(run(Bench(options, Path(directory)))) else 1


if __name__ == "__main__":
    sys.exit(main())
