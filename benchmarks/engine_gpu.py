"""The engine on a GPU with the Llama family: texts against the CPU's, and the time of a step against its floors.

``python -m benchmarks.engine_gpu --out DIR [--commit HASH] [part ...]``: parts `texts` (tiny models), `steps` (a random
bfloat16 model of the shape of Llama 3 8B), `loop` (the same under the scheduler), `smollm2` (`--cpu-texts FILE`, made by
``--write-cpu-texts`` on a CPU). Goes on after a failure, prints everything, writes one record.
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks import engine_steps, engine_texts
from benchmarks.engine_parts import Parts, parts_parser, run_parts


def main() -> int:
    parser = parts_parser(__doc__, ("texts", "steps", "loop"))
    parser.add_argument("--cpu-texts", type=Path)
    parser.add_argument("--model", type=Path, help="a converted SmolLM2")
    parser.add_argument("--write-cpu-texts", type=Path)
    options = parser.parse_args()
    if options.write_cpu_texts:
        options.write_cpu_texts.write_text(json.dumps(engine_texts.smollm2_texts(options.model, torch.device("cpu"))))
        return 0
    parts: Parts = {
        "texts": engine_texts.tiny_texts,
        "steps": engine_steps.steps,
        "loop": engine_steps.loop,
        "smollm2": lambda: engine_texts.compare_smollm2(options.model, options.cpu_texts),
    }
    return run_parts("engine_h200", parts, options)


if __name__ == "__main__":
    sys.exit(main())
