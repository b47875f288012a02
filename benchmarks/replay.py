"""Replays a Mooncake-format trace (public, or recorded by the gateway) against an OpenAI-compatible server.

    python -m benchmarks.replay --trace FILE --url http://127.0.0.1:8000 --model smollm2 --rate 2 --requests 200

Prompts are token ids made from the trace's block hashes: equal hash, equal block, so that caches see the recorded
reuse; no text is involved. Arrivals keep their recorded gaps, divided by `--rate`; turns of a recorded session carry
its name. Prints requests, errors, times to the first token, and the share of prompt tokens that the server found
cached.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.record import write_record
from benchmarks.traces import BLOCK_TOKENS, hashed


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the trace, scaled."""

    at: float
    prompt: tuple[int, ...]
    output_tokens: int
    session: str


@dataclass(slots=True)
class Tally:
    """What came back."""

    sent: int = 0
    errors: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


def read(path: Path, *, vocabulary: int, shrink: int, max_output: int, limit: int) -> list[Request]:
    """Load at most `limit` requests; lengths and blocks are divided by `shrink`, token ids are below `vocabulary`."""
    requests: list[Request] = []
    for line in path.read_text().splitlines()[:limit]:
        row = json.loads(line)
        block = max(1, row.get("block_size", BLOCK_TOKENS) // shrink)
        length = max(1, row["input_length"] // shrink)
        tokens: list[int] = []
        for name in row["hash_ids"]:
            tokens += _block(name, block, vocabulary)
        # What the recorded pages leave out (the last, partial one) is the request's own.
        tokens += _block(len(requests) + (1 << 60), max(0, length - len(tokens)), vocabulary)
        output = max(1, min(max_output, row["output_length"] // shrink))
        session = str(row["session"]) if "session" in row else ""
        requests.append(Request(row["timestamp"] / 1000, tuple(tokens[:length]), output, session))
    return requests


def _block(name: int, size: int, vocabulary: int) -> list[int]:
    rng = random.Random(hashed(name & 0xFFFFFFFFFFFFFFFF))
    # The first ids of most vocabularies are special.
    return [rng.randrange(min(256, vocabulary // 2), vocabulary) for _ in range(size)]


async def replay(requests: Sequence[Request], client: httpx.AsyncClient, *, model: str, rate: float) -> Tally:
    """Send all at their times; return when all have ended."""
    tally, began = Tally(), time.monotonic()

    async def send(request: Request) -> None:
        await asyncio.sleep(max(0.0, request.at / rate - (time.monotonic() - began)))
        try:
            await _send(request, client, model, tally)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}"[:200])

    await asyncio.gather(*(send(request) for request in requests))
    return tally


async def _send(request: Request, client: httpx.AsyncClient, model: str, tally: Tally) -> None:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Session-Affinity": request.session} if request.session else {}
    started, first, usage = time.monotonic(), None, None
    tally.sent += 1
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:150]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            first = first or time.monotonic()
            usage = event.get("usage") or usage
    if first is None or usage is None:
        raise ValueError("the stream ended without a token or without usage")
    tally.ttft.append(first - started)
    tally.prompt_tokens += usage["prompt_tokens"]
    tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def summary(tally: Tally) -> dict[str, object]:
    """Return the figures of a record."""
    ttft = np.array(tally.ttft or [0.0])
    return {
        "requests": tally.sent,
        "errors": len(tally.errors),
        "first_errors": tally.errors[:3],
        "ttft_mean_s": round(float(ttft.mean()), 4),
        "ttft_p50_s": round(float(np.percentile(ttft, 50)), 4),
        "ttft_p99_s": round(float(np.percentile(ttft, 99)), 4),
        "prompt_tokens": tally.prompt_tokens,
        "cached_percent": round(100 * tally.cached_tokens / max(1, tally.prompt_tokens), 2),
    }


async def run(arguments: argparse.Namespace) -> Tally:
    requests = read(
        arguments.trace,
        vocabulary=arguments.vocabulary,
        shrink=arguments.shrink,
        max_output=arguments.max_output,
        limit=arguments.requests,
    )
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=300.0, limits=limits, trust_env=False) as client:
        return await replay(requests, client, model=arguments.model, rate=arguments.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=1.0, help="times the recorded arrival rate")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, for small models")
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--record", default="", help="name of the record to write")
    arguments = parser.parse_args()
    result = summary(asyncio.run(run(arguments)))
    print(json.dumps(result, indent=1))
    if arguments.record:
        write_record(arguments.record, result)


if __name__ == "__main__":
    main()
