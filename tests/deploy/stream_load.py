"""Streams against one address until a file appears; prints how many there were and every fault. A process of the lab's.

`python -m tests.deploy.stream_load URL STOP_FILE CONCURRENCY`. The texts are those that the scripted model must say.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from tests.fakes.chaos import faults, storm
from tests.fakes.truth import scripted_text

ROUND = 12


def items(seed):
    """Long answers, so that some are open whenever something is restarted."""
    rng = random.Random(seed)
    for number in range(ROUND):
        prompt = f"round {seed} request {number} " + "".join(
            rng.choice("abcdefgh ") for _ in range(rng.randint(1, 300))
        )
        tokens = rng.randint(60, 200)
        yield prompt, scripted_text(prompt, tokens), tokens


def main():
    url, stop, concurrency = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    found, count, begun, seed = [], 0, time.monotonic(), 0
    while not stop.exists():
        outcomes = asyncio.run(
            storm(url, "scripted", list(items(seed)), concurrency=concurrency, cancel_share=0, seed=seed)
        )
        found += [fault for outcome in outcomes for fault in faults(outcome)]
        count += len(outcomes)
        seed += 1
    print(json.dumps({"streams": count, "faults": found, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
