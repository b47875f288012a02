"""V4.1 on a GPU: equality with references and CPU, times of steps against their floors, the engine with and without DSpark.

``python -m benchmarks.v41_gpu --out DIR [--commit HASH] [part ...]``; parts: `layers`, `tiny`, `batches` (equality),
`mini`, `slice` (times), `loop` (the engine). Goes on after a failure, prints everything, writes one record.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from benchmarks import v41_equality, v41_loop, v41_steps
from engine.models.deepseek_v41.presets import mini_config

PARTS: dict[str, Callable[[], object]] = {
    "layers": v41_equality.layers,
    "tiny": v41_equality.tiny,
    "batches": v41_equality.batches,
    "mini": lambda: v41_steps.steps(mini_config()),
    "slice": lambda: v41_steps.steps(v41_steps.slice_config(), v41_steps.DECODE[:4]),
    "loop": v41_loop.loop,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    options = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, object] = {}
    failed = False
    for name in options.parts:
        begun = time.perf_counter()
        try:
            result[name] = PARTS[name]()
        except Exception:  # noqa: BLE001 - one part's failure must not cost the others' run
            failed = True
            result[name] = {"failed": traceback.format_exc()[-3000:]}
            print(traceback.format_exc()[-2500:], flush=True)
        print(f"part {name}: {time.perf_counter() - begun:.1f} s", flush=True)
        torch.cuda.empty_cache()
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.v41_gpu " + " ".join(options.parts),
            "commit": options.commit,
            "machine": {"gpu": properties.name, "memory_bytes": properties.total_memory, "torch": torch.__version__,
                        "triton": triton.__version__, "python": sys.version.split()[0]},
            "note": "random weights; decode: median of graph replays; floors: bytes that must be read over the copy rate",
            "result": result,
        }  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "v41_h200.json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
