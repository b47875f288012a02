"""Streamed tokens per CPU-second of the gateway below HTTP: links, mailboxes, samples, retries' bookkeeping.

One process: a stream that ticks like a decode worker (one frame a step for all requests) in place of gRPC, and a
consumer per sample that drops what it gets. `source only` is the ticking by itself. Also the cost of placing one
request over 16, 128 and 1,000 workers. Run: `python -m benchmarks.gateway_orchestrator [--record] [--seconds S]`.
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from benchmarks.record import write_record
from core.stream import FromGateway, StepFrame, StreamHello, Submit
from core.worker import Role
from gateway.resume import Output
from gateway.router import Placed, Work
from tests.fakes.cluster import load, registration
from tests.fakes.sim_gateway import SimGateway, prompt

STEP_S = 0.010
ENDLESS = 100_000_000


class TickingStream:
    """One token for every handle each step."""

    def __init__(self, seconds: float) -> None:
        self._handles: list[int] = []
        self._end = time.monotonic() + seconds

    def post(self, frame: FromGateway) -> None:
        if isinstance(frame, Submit):
            self._handles.append(frame.handle)

    async def frames(self) -> AsyncIterator[StepFrame]:
        sequence = 0
        while time.monotonic() < self._end:
            await asyncio.sleep(STEP_S)
            if not self._handles:
                continue
            sequence += 1
            count = len(self._handles)
            yield StepFrame(
                sequence=sequence,
                handles=self._handles,
                positions=[sequence - 1] * count,
                counts=[1] * count,
                tokens=[7] * count,
            )
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


class TickingOpener:
    """Opens nothing but ticking streams."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def open(self, address: str, hello: StreamHello, timeout_s: float = 3.0) -> TickingStream:  # noqa: ARG002 - the contract's signature
        return TickingStream(self._seconds)


async def stream_samples(streams: int, seconds: float) -> dict[str, float]:
    gateway = SimGateway()
    gateway.links._opener = TickingOpener(seconds)  # noqa: SLF001 - the fake gateway has no other way in
    gateway.add_prefill("p1")
    gateway.add_decode("d1", num_rows=1024, max_tokens_total=2 * ENDLESS)
    received = 0

    async def consume(number: int) -> None:
        nonlocal received
        asked = prompt(tokens=(number + 3, 7), max_tokens=ENDLESS, timeout_s=600.0)
        async for delta in gateway.orchestrator.generate(asked):
            received += len(delta.token_ids)

    tasks = [asyncio.create_task(consume(number)) for number in range(streams)]
    await asyncio.sleep(0.5)
    begun, cpu, wall = received, time.process_time(), time.monotonic()
    await asyncio.sleep(seconds - 1.0)
    tokens, cpu, wall = received - begun, time.process_time() - cpu, time.monotonic() - wall
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await gateway.close()
    return {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall, "cpu_share": cpu / wall}


async def source_only(streams: int, seconds: float) -> dict[str, float]:
    stream = TickingStream(seconds)
    stream._handles = list(range(streams))  # noqa: SLF001 - our own
    received, cpu = 0, time.process_time()
    try:
        async with asyncio.timeout(seconds):
            async for frame in stream.frames():
                received += len(frame.tokens)
    except TimeoutError:
        pass
    return {"tokens_per_cpu_s": received / (time.process_time() - cpu)}


async def place(workers: int, prompt_tokens: int, rounds: int = 200) -> dict[str, float]:
    """Microseconds of CPU to hash and place one request, and of the same with the hashes known."""
    gateway = SimGateway()
    rng = random.Random(1)
    for number in range(workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        member, _ = gateway.directory.join(registration(f"w{number}", role, max_tokens_total=1 << 20))
        gateway.directory.heartbeat(member, load(running_requests=rng.randrange(8)))
        gateway.index.add(member.slot, member.incarnation, 1000)
    router = gateway.orchestrator._cluster.router  # noqa: SLF001 - the part under test
    works = [Work(prompt(tokens=range(n, n + prompt_tokens), max_tokens=64), Output()) for n in range(rounds)]
    cold = time.process_time()
    for work in works:
        assert isinstance(router.place(work), Placed)
    cold = time.process_time() - cold
    warm = time.process_time()
    for work in works:
        router.place(work)
    warm = time.process_time() - warm
    await gateway.close()
    return {"first_us": 1e6 * cold / rounds, "again_us": 1e6 * warm / rounds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for streams in (64, 256):
            result[f"source only, {streams} streams"] = runner.run(source_only(streams, options.seconds))
            result[f"samples, {streams} streams"] = runner.run(stream_samples(streams, options.seconds))
        for workers in (16, 128, 1000):
            for tokens in (512, 8192):
                key = f"place, {workers} workers, {tokens} prompt tokens"
                result[key] = runner.run(place(workers, tokens))
    for key, value in result.items():
        print(key, {name: round(figure, 3) for name, figure in value.items()})
    if options.record:
        write_record("gateway_orchestrator", result, note="step 10 ms, one token a step and stream; shared machine")


if __name__ == "__main__":
    main()
