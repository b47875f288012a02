"""Which clusters the parts of `handover_gpu` need, started side by side on one GPU or two."""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.handover_cluster import ROOT, Cluster
from benchmarks.record import write_record

LARGE = "llama-8b-random"
START_S = 300.0
LARGE_PAGES = {1: 768, 2: 1536}
"""By GPUs: all clusters are there at once."""
LARGE_SETS = (
    "engine.page_tokens=64",
    "engine.num_rows=64",
    "engine.chunk_tokens=2048",
    "engine.deterministic=false",
    "engine.graphs.tiers=[1,4,16,32,64]",
)
SMALL_SETS = ("engine.num_pages=2048", "engine.chunk_tokens=256", "transfer.digests=true")
_ON_LARGE = {"overlap", "timeline", "load", "kill_large"}
_WITH_END = {"overlap", "kill_large"}
_ON_SMALL = {"tokens", "kill"}
_PREPARE = "import sys; from deploy.local.models import *; [model_directory(m, cache_directory(), print) for m in sys.argv[1:]]"


@dataclass(slots=True)
class Bench:
    """What all parts share."""

    options: argparse.Namespace
    directory: Path
    clusters: dict[str, Cluster] = field(default_factory=dict)
    started: bool = False
    result: dict[str, object] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, str]:
        """Of prefill and decode workers."""
        device = str(self.options.device)
        return (device, device) if self.options.gpus == 1 else (f"{device}:0", f"{device}:1")

    def note(self, name: str, value: object) -> None:
        """Keep a part's figures and write the record: whatever comes later cannot cost them."""
        self.result[name] = value
        options = self.options
        record = f"handover_h200_x{options.gpus}"
        write_record(record, self.result, note=options.note, directory=options.out, commit_run=options.commit)

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

    async def serving(self, name: str) -> Cluster:
        """Return a cluster once it serves; raises RuntimeError with its last words if it does not in time."""
        cluster = self.clusters[name]
        if not cluster.address:
            await asyncio.to_thread(cluster.wait, cluster.began + START_S)
        return cluster


def _sets(sets: Sequence[str]) -> list[str]:
    return [part for value in sets for part in ("--set", f"all:{value}")]


def needs_clusters(part: str) -> bool:
    """True if a part asks clusters."""
    return part in _ON_LARGE | _ON_SMALL


def prepare(models: Sequence[str]) -> subprocess.Popen[bytes]:
    """Write the models that have to be written before anything can serve them, beside whatever runs meanwhile."""
    return subprocess.Popen([sys.executable, "-c", _PREPARE, *models], cwd=ROOT)


def start(bench: Bench, parts: Sequence[str]) -> None:
    """Start what the parts need."""
    options, bench.started = bench.options, True
    large = LARGE if not options.large else str(options.large)
    sets = (*LARGE_SETS, f"engine.num_pages={LARGE_PAGES[options.gpus]}")
    if _ON_LARGE & set(parts):
        bench.pair(large, "large-chunks", sets)
        if _WITH_END & set(parts):
            bench.pair(large, "large-end", sets, "--set", "decode:transfer.pull_chunks=false")
        bench.alone(large, "large-alone", sets, workers=options.gpus)
    for model in options.models if _ON_SMALL & set(parts) else ():
        bench.alone(model, f"{model}-alone", SMALL_SETS)
        for way in options.transports if "tokens" in parts else options.transports[:1]:
            transport, _, blocks = way.partition("@")
            more = ("--set", f"decode:transfer.gather_blocks={blocks}") if blocks else ()
            bench.pair(model, pair_name(model, way), SMALL_SETS, "--transfer", transport, *more)


def pair_name(model: str, transport: str) -> str:
    """Return the name of a pair's cluster."""
    return f"{model}-{transport}"
