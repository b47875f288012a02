"""Parts of a benchmark on a GPU, one after the other whatever fails, and one record that is written again after each.

A session may end at any moment: what was measured until then is kept. Knows no part.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

Parts = Mapping[str, Callable[[], object]]


def gpu_machine() -> dict[str, object]:
    """Return what of this machine bears on a figure."""
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def _shown(argument: str) -> str:
    """Return an argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def write_gpu_record(path: Path, commit: str, note: str, result: object, **more: object) -> None:
    """Write a record of this process's command."""
    body = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *(_shown(arg) for arg in sys.argv[1:])]),
        "commit": commit,
        "machine": gpu_machine(),
        "note": note,
        **more,
        "result": result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")


def parts_parser(description: str | None, default: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return a parser of what all such benchmarks are told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--commit", default="")
    parser.add_argument("parts", nargs="*", default=list(default))
    return parser


def run_parts(name: str, parts: Parts, options: argparse.Namespace, note: str = "") -> int:
    """Run the parts that were asked for and write ``<name>.json``; returns 1 if one failed."""
    result: dict[str, object] = {}
    failed = 0
    for part in options.parts:
        begun = time.perf_counter()
        try:
            result[part] = parts[part]()
        except Exception:  # noqa: BLE001 - one part's failure must not cost the others' run
            failed = 1
            result[part] = {"failed": traceback.format_exc()[-3000:]}
            print(traceback.format_exc()[-3000:], flush=True)
        print(f"part {part}: {time.perf_counter() - begun:.1f} s", flush=True)
        torch.cuda.empty_cache()
        write_gpu_record(options.out / f"{name}.json", options.commit, note, result)
    return failed
