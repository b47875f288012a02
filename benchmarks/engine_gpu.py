"""The engine on a GPU with the Llama family: texts against the CPU's, and the time of a step against its floors.

``python -m benchmarks.engine_gpu --out DIR [--commit HASH] [part ...]``: parts `texts` (tiny models), `steps` (a random
bfloat16 model of the shape of Llama 3 8B), `loop` (the same under the scheduler), `smollm2` (`--cpu-texts FILE`, made by
``--write-cpu-texts`` on a CPU). Goes on after a failure, prints everything, writes one record.
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

from benchmarks import engine_steps, engine_texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--cpu-texts", type=Path)
    parser.add_argument("--model", type=Path, help="a converted SmolLM2")
    parser.add_argument("--write-cpu-texts", type=Path)
    parser.add_argument("parts", nargs="*", default=["texts", "steps", "loop"])
    options = parser.parse_args()
    if options.write_cpu_texts:
        options.write_cpu_texts.write_text(json.dumps(engine_texts.smollm2_texts(options.model, torch.device("cpu"))))
        return 0
    parts: dict[str, Callable[[], object]] = {
        "texts": engine_texts.tiny_texts,
        "steps": engine_steps.steps,
        "loop": engine_steps.loop,
        "smollm2": lambda: engine_texts.compare_smollm2(options.model, options.cpu_texts),
    }
    result: dict[str, object] = {}
    failed = False
    properties = torch.cuda.get_device_properties(0)
    for name in options.parts:
        begun = time.perf_counter()
        try:
            result[name] = parts[name]()
        except Exception:  # noqa: BLE001 - one part's failure must not cost the others' run
            failed = True
            result[name] = {"failed": traceback.format_exc()[-3000:]}
            print(traceback.format_exc()[-3000:], flush=True)
        print(f"part {name}: {time.perf_counter() - begun:.1f} s", flush=True)
        torch.cuda.empty_cache()
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.engine_gpu " + " ".join(options.parts),
            "commit": options.commit,
            "machine": {"gpu": properties.name, "memory_bytes": properties.total_memory, "torch": torch.__version__,
                        "python": sys.version.split()[0]},
            "result": result,
        }  # fmt: skip
        (options.out / "engine_h200.json").write_text(json.dumps(record, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
