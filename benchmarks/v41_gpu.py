"""V4.1 on a GPU: equality with references and CPU, times of steps against their floors, the engine with and without DSpark.

``python -m benchmarks.v41_gpu --out DIR [--commit HASH] [part ...]``; parts: `layers`, `shadow`, `tiny`, `batches`
(equality), `mini`, `slice` (times), `loop` (the engine). Goes on after a failure, prints everything, writes one record.
"""

import sys

from benchmarks import v41_equality, v41_loop, v41_shadow, v41_steps
from benchmarks.engine_parts import Parts, parts_parser, run_parts
from engine.models.deepseek_v41.presets import mini_config

PARTS: Parts = {
    "layers": v41_equality.layers,
    "shadow": v41_shadow.shadow,
    "tiny": v41_equality.tiny,
    "batches": v41_equality.batches,
    "mini": lambda: v41_steps.steps(mini_config()),
    "slice": lambda: v41_steps.steps(v41_steps.slice_config(), v41_steps.DECODE[:4]),
    "loop": v41_loop.loop,
}


NOTE = "random weights; decode: median of graph replays; floors: bytes that must be read over the copy rate"


if __name__ == "__main__":
    sys.exit(run_parts("v41_h200", PARTS, parts_parser(__doc__, tuple(PARTS)).parse_args(), NOTE))
