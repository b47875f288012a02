"""Tokens per CPU-second of the generate stream alone: a worker process that sends one frame per step, one consumer.

One decode worker with N running requests makes a step every `--step-ms`; the consumer (what a gateway process does
below HTTP: read, decode the frame) and the producer (encode, write) count their own CPU time. No model, no text.
"""

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.record import write_record
from core.ids import Incarnation
from core.rpc.generate import GenerateClient, SendFrame, add_generate
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.stream import FromGateway, StepFrame, StreamHello

WORKER = Incarnation("d" * 32)
GATEWAY = Incarnation("a" * 32)
SECRET = b"a secret for benchmarks"


@dataclass(frozen=True)
class Figure:
    """One row of the record."""

    streams: int
    step_ms: float
    frames: int
    tokens: int
    consumer_tokens_per_cpu_s: float
    producer_tokens_per_cpu_s: float
    consumer_us_per_frame: float


class Steps:
    """A decode worker that only sends: one token for each of `streams` handles, every `step_s`."""

    def __init__(self, streams: int, step_s: float, frames: int) -> None:
        self._streams = streams
        self._step_s = step_s
        self._frames = frames
        self.cpu_s = 0.0
        self.done = asyncio.Event()

    async def connect(self, hello: StreamHello, frames: AsyncIterator[FromGateway], send: SendFrame) -> None:
        """Send all frames, then wait for the gateway to go."""
        del hello
        handles = np.arange(self._streams, dtype=np.uint32) + 1_000_000
        counts = np.ones(self._streams, dtype=np.int32)
        started, next_step = time.process_time(), time.monotonic()
        for number in range(1, self._frames + 1):
            positions = np.full(self._streams, number, dtype=np.int32)
            tokens = (handles.astype(np.int64) * number) % 128_000
            frame = StepFrame(sequence=number, handles=handles, positions=positions, counts=counts, tokens=tokens)
            await send(frame)
            next_step += self._step_s
            await asyncio.sleep(max(0.0, next_step - time.monotonic()))
        self.cpu_s = time.process_time() - started
        async for _frame in frames:
            pass
        self.done.set()


def serve(pipe: Connection, streams: int, step_s: float, frames: int) -> None:
    """Body of the worker process: tell the address, serve one stream, tell the CPU seconds."""

    async def main() -> float:
        steps = Steps(streams, step_s, frames)
        server = RpcServer(Proof(SECRET, WORKER))
        add_generate(server, steps)
        pipe.send(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        await steps.done.wait()
        await server.stop(0)
        return steps.cpu_s

    pipe.send(asyncio.run(main()))


async def consume(address: str, frames: int) -> tuple[float, int]:
    """Return our CPU seconds and the tokens read."""
    hello = StreamHello(gateway=GATEWAY, worker=WORKER)
    stream = await GenerateClient(Proof(SECRET, GATEWAY)).open(address, hello, timeout_s=10)
    started, tokens, seen = time.process_time(), 0, 0
    async for frame in stream.frames():
        tokens += len(frame.tokens)
        seen += 1
        if seen == frames:
            break
    cpu_s = time.process_time() - started
    await stream.close()
    return cpu_s, tokens


def measure(streams: int, step_ms: float, frames: int) -> Figure:
    """Run one worker process against this process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=serve, args=(theirs, streams, step_ms / 1000, frames))
    worker.start()
    try:
        cpu_s, tokens = asyncio.run(consume(ours.recv(), frames))
        producer_cpu_s = ours.recv()
    finally:
        worker.join(10)
        if worker.is_alive():
            worker.kill()
    return Figure(
        streams=streams,
        step_ms=step_ms,
        frames=frames,
        tokens=tokens,
        consumer_tokens_per_cpu_s=round(tokens / cpu_s),
        producer_tokens_per_cpu_s=round(tokens / producer_cpu_s),
        consumer_us_per_frame=round(1e6 * cpu_s / frames, 1),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/rpc_step.json")
    arguments = parser.parse_args()
    figures = [measure(streams, arguments.step_ms, arguments.frames) for streams in arguments.streams]
    for figure in figures:
        print(
            f"{figure.streams:4d} streams: consumer {figure.consumer_tokens_per_cpu_s:>9,} tokens/CPU-s, "
            f"producer {figure.producer_tokens_per_cpu_s:>9,}, {figure.consumer_us_per_frame} us per frame"
        )
    if arguments.record:
        note = f"CPU seconds of each side; load average {os.getloadavg()[0]:.1f} at the end"
        print(write_record("rpc_step", [asdict(figure) for figure in figures], note=note))


if __name__ == "__main__":
    main()
