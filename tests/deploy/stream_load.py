"""Streams against one address until a file appears; prints how many there were and every fault. A process of the lab's.

Makes a file `.begun` beside that one when it begins.

`python -m tests.deploy.stream_load URL STOP_FILE CONCURRENCY [LANES...]`. The texts are those that the scripted model must
say; of each further revision, which has so many lanes of KV, a stream may say its text instead, but never a mixture.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import msgspec

from engine.models.builtin import SCRIPTED
from tests.fakes.chaos import faults, storm
from tests.fakes.truth import scripted_text

ROUNDS = 3
"""So many streams as fit at a time, before the next look at the file."""


def items(seed, count):
    """Long answers, so that some are open whenever something is restarted."""
    rng = random.Random(seed)
    for number in range(count):
        prompt = f"round {seed} request {number} " + "".join(
            rng.choice("abcdefgh ") for _ in range(rng.randint(1, 300))
        )
        tokens = rng.randint(60, 200)
        yield prompt, scripted_text(prompt, tokens), tokens


def main():
    url, stop, concurrency = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    revisions = {lanes: msgspec.structs.replace(SCRIPTED, kv_lanes=lanes) for lanes in map(int, sys.argv[4:])}
    found, count, begun, seed, told = [], 0, time.monotonic(), 0, dict.fromkeys(revisions, 0)
    stop.with_suffix(".begun").touch()
    while not stop.exists():
        outcomes = asyncio.run(
            storm(
                url,
                "scripted",
                list(items(seed, ROUNDS * concurrency)),
                concurrency=concurrency,
                cancel_share=0,
                seed=seed,
            )
        )
        for lanes, config in revisions.items():
            for outcome in outcomes:
                if outcome.text == (text := scripted_text(outcome.prompt, outcome.max_tokens, config)):
                    outcome.expected, told[lanes] = text, told[lanes] + 1
        found += [fault for outcome in outcomes for fault in faults(outcome)]
        count += len(outcomes)
        seed += 1
    result = {"streams": count, "faults": found, "seconds": round(time.monotonic() - begun, 1)}
    print(json.dumps(result | ({"of other revisions": told} if told else {})))


if __name__ == "__main__":
    main()
