"""Prefill and decode workers on GPUs, by `tandem up`: same tokens as one worker, what moves, how fast, and what a death costs.

    python -m benchmarks.handover_gpu --out DIR [--gpus 1|2] [--models tiny-llama v41-tiny] [--commit HASH] [--parts ...]

Parts: `link` (each way between two processes beside a plain copy), `table` (a gather and expert products, half a peer's),
`overlap` (first and second token with pulls chunk by chunk and at the end), `timeline` (the stages between those two),
`load` (1P1D against two workers that do both), `tokens` (equal to one worker's), `kill` and `kill_large` (-9, of a prefill
worker). `link` and `table` have the machine for themselves if they come first; then all clusters are started side by side and
asked in turn. Goes on after a failure, prints everything, gives each part its time, and writes the record again after each.
"""

import argparse
import asyncio
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks import handover_link, handover_right, handover_times
from benchmarks.handover_bench import LARGE, Bench, needs_clusters, prepare, start
from benchmarks.handover_cluster import Cluster
from core.errors import TandemError

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
LOAD_S = 6.0
PARTS: dict[str, tuple[Callable[[Bench], Awaitable[object]], float]] = {
    "link": (handover_link.link, 150.0),
    "table": (handover_link.table, 60.0),
    "overlap": (handover_times.overlap, 190.0),
    "timeline": (handover_times.timeline, 50.0),
    "load": (handover_times.measure_load, 170.0),
    "tokens": (handover_right.tokens, 170.0),
    "kill": (handover_right.kill, 110.0),
    "kill_large": (handover_right.kill_large, 60.0),
}
"""Each with the seconds that it may take, those included in which its clusters come up."""


async def run(bench: Bench) -> bool:
    """Run the parts that were asked for; True if none failed."""
    options = bench.options
    good, began = True, time.monotonic()
    writing = prepare(options.models) if set(options.parts) & {"tokens", "kill"} else None
    bench.note("gpus", options.gpus)
    bench.note("devices", bench.devices)
    try:
        for name in options.parts:
            part, limit_s = PARTS[name]
            left_s, since = options.seconds - (time.monotonic() - began), time.monotonic()
            if left_s < LEAST_S:
                good = False
                bench.note(name, {"left out": f"{left_s:.0f} s were left"})
                continue
            if needs_clusters(name) and not bench.started:
                start(bench, options.parts)
            try:
                async with asyncio.timeout(min(limit_s, left_s)):
                    bench.note(name, await part(bench))
            except Exception:  # noqa: BLE001 - one part's failure must not cost the others' run
                good, told = False, traceback.format_exc()[-4000:]
                bench.note(f"{name} failed", told)
                print(told, flush=True)
            print(f"part {name}: {time.monotonic() - since:.1f} s, {time.monotonic() - began:.1f} s in all", flush=True)
    finally:
        if writing is not None and writing.poll() is None:
            writing.terminate()
        await _stop(bench)
    return good


LEAST_S = 12.0
"""With less left a part is not begun."""


async def _stop(bench: Bench) -> None:
    """End all clusters, keep their logs beside the record, and print what they say of trouble."""
    bench.note("restarts", {name: _restarts(cluster) for name, cluster in bench.clusters.items()})
    stops = [asyncio.to_thread(cluster.stop) for cluster in bench.clusters.values()]
    await asyncio.gather(*stops, return_exceptions=True)
    with tarfile.open(bench.options.out / "clusters.tgz", "w:gz") as logs:
        for cluster in bench.clusters.values():
            for log in sorted(cluster.directory.glob("*.log")):
                logs.add(log, f"{cluster.name}/{log.name}")
    for cluster in bench.clusters.values():
        bad = [line for line in cluster.grep("") if " WARNING " in line or " ERROR " in line or "Traceback" in line]
        told = [
            line for line in cluster.grep("ready after") + cluster.grep("recorded") if "decode steps of" not in line
        ]
        print(f"== {cluster.name}:", *[line[-160:] for line in told], *bad[:8], sep="\n  ", flush=True)
        if not cluster.address:
            print(cluster.last_lines(), flush=True)


def _restarts(cluster: Cluster) -> dict[str, object]:
    """Return (restarts, state, reason) of each process that did not simply run."""
    try:
        processes = cluster.status()["processes"]
    except (OSError, TandemError, RuntimeError) as error:
        return {"not asked": str(error)}
    told = {str(p["id"]): (p["restarts"], p["state"], p["reason"]) for p in processes}
    return {name: facts for name, facts in told.items() if facts[0] or facts[1] != "ready"}


def _leave(signum: int, frame: object) -> None:
    del signum, frame
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--device", default="cuda", help="cpu: try the script itself")
    parser.add_argument("--models", nargs="*", default=["tiny-llama", "v41-tiny"])
    parser.add_argument("--transports", nargs="+", default=["cuda-ipc", "tcp"], help="of the pairs of each model")
    parser.add_argument("--large", default="", help=f"instead of {LARGE}")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--load-s", type=float, default=LOAD_S)
    parser.add_argument("--link", default="", help="further arguments of benchmarks.transfer_gpu, as one: --link=...")
    parser.add_argument("--seconds", type=float, default=3600.0, help="parts that do not fit are left out")
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
