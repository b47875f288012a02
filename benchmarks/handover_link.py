"""What moves between two GPUs without any worker: each transport, and kernels that read through tables of addresses.

In processes of their own, so that a fault of a library costs its own figures only.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.handover_bench import Bench
from benchmarks.handover_cluster import ROOT

APART: tuple[tuple[str, ...], ...] = (
    ("cuda-ipc@each", "cuda-ipc@0", "cuda-ipc@16", "cuda-ipc@32", "cuda-ipc@64"),
    ("nixl",),
    ("tcp", "shm"),
)
"""Of two GPUs, and what of it is asked of one."""
WITHIN: tuple[tuple[str, ...], ...] = (("cuda-ipc@0", "cuda-ipc@32"), ("nixl",))
LARGE = ("cuda-ipc@each", "cuda-ipc@0", "cuda-ipc@32")
LARGE_PAGES = ("--pages=64", f"--page-bytes={8 << 20}")
"""Of the Llama-8B-shaped model: 64 tokens of all layers."""
LIMIT_S = 60.0
TALK = ("UCX_LOG_LEVEL=info", "UCX_PROTO_INFO=y")
"""Has NIXL's library say by what it moves bytes."""
BY_ENVIRONMENT = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y"
"""What our engine asks of UCX by its configuration; asked once more this way if that was slow."""
SLOW_GB_PER_S = 20.0
_KEPT = 200
"""Lines of a library's talk."""


async def link(bench: Bench) -> object:
    """Each transport between two processes, beside a plain copy from device to device, for each target."""
    found: dict[str, dict[str, object]] = {}
    for target in reversed(range(bench.options.gpus)):
        rows = found[f"cuda:0 to cuda:{target}"] = {}
        for transports in APART if target or bench.options.gpus == 1 else WITHIN:
            rows |= await _link_to(bench, target, transports)
        if 0 < _speed(rows.get("nixl")) < SLOW_GB_PER_S:
            again = await _link_to(bench, target, ("nixl",), BY_ENVIRONMENT)
            rows[f"nixl, {BY_ENVIRONMENT}"] = again["nixl"]
        if target:
            rows["pages of 8 MiB"] = large = await _link_to(bench, target, LARGE, pages=LARGE_PAGES)
            print(json.dumps(_short(large)), flush=True)
        print(target, json.dumps(_short(rows)), flush=True)
        bench.note("link", found)
    return found


def _speed(row: object) -> float:
    """Return GB/s of all pages; 0 for what did not run."""
    whole = row.get("all_pages") if isinstance(row, dict) else None
    return float(whole["gb_per_s"]) if isinstance(whole, dict) else 0.0


async def _link_to(
    bench: Bench, target: int, transports: Sequence[str], *more: str, pages: Sequence[str] = ()
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as out:
        command = ["benchmarks.transfer_gpu", "--out", out, "--target-device", str(target), "--commit", "x"]
        talk = (*TALK, *more) if "nixl" in transports else ()
        said = await _ran([*command, "--transports", *transports, *pages, *bench.options.link.split()], LIMIT_S, talk)
        if talk:
            lines = [line[:300] for line in said.splitlines()]
            (bench.options.out / f"nixl_{target}.log").write_text("\n".join((*lines[:_KEPT], "...", *lines[-_KEPT:])))
        path = Path(out) / "transfer_gpu.json"
        if not path.exists():
            return {name: {"did not run": said[-1500:]} for name in transports}
        return json.loads(path.read_text())["result"]


def _short(rows: dict[str, object]) -> dict[str, object]:
    """Return the speeds of what ran, for people."""
    short: dict[str, object] = {}
    for name, row in rows.items():
        if isinstance(row, dict):
            parts = {n: v["gb_per_s"] for n, v in row.items() if isinstance(v, dict) and "gb_per_s" in v}
            short[name] = {n: round(v, 2) for n, v in parts.items()} or row
    return short


async def table(bench: Bench) -> object:
    """A gather and a grouped product through tables of addresses, half of which are the other GPU's."""
    with tempfile.TemporaryDirectory() as out:
        path = Path(out) / "table.json"
        command = ["benchmarks.handover_table", "--peer", str(bench.options.gpus - 1), "--out", str(path)]
        said = await _ran(command, LIMIT_S, ())
        if not path.exists():
            raise RuntimeError(said[-3000:])
        return json.loads(path.read_text())


async def _ran(module: Sequence[str], limit_s: float, environment: Sequence[str]) -> str:
    """Run a module of ours, with more environment, for so long at most; return what it said."""
    process = await asyncio.create_subprocess_exec(
        "env",
        *environment,
        sys.executable,
        "-m",
        *module,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    reading = asyncio.ensure_future(process.communicate())
    try:
        said, _ = await asyncio.wait_for(asyncio.shield(reading), limit_s)
    except TimeoutError:
        said = b"ended: it took too long\n"
    finally:
        # Its children, too: a server that hangs would keep the pipe open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    if not reading.done():
        said += (await reading)[0]
    return said.decode(errors="replace")
