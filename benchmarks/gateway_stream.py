"""Streamed tokens per CPU-second of the gateway's HTTP and text part, against a generator that ticks like an engine.

Server and client are separate processes on real sockets; only the server's CPU time counts. The generator hands one
token to every open stream each step. Beside the figures stand what it costs by itself (`source only`) and the floor:
the same ticks through the same server with a constant chunk instead of HTTP and text work (`bare`); neither is
subtracted. Required (architecture A17, with full parsing): 75,000 at 256 streams, 55,000 at 64.
Run: `python -m benchmarks.gateway_stream [--record] [--seconds S] [--runs N]`.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.record import write_record
from core.clock import SystemClock
from core.ids import RequestId
from core.request import SamplingParams, StopRules
from gateway.generation import Delta, Prompt, ServedModel, Tap
from gateway.http.asgi import Api, build_asgi
from gateway.http.client import Receive, Scope, Send
from gateway.http.config import ApiConfig
from gateway.http.metrics import HttpMetrics
from gateway.http.server import HttpServer
from gateway.text.template_chat import TemplateChat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.deepseek import WEATHER, load_chat, write_trained
from tests.fakes.tokenizer import build_tokenizer

STEP_S = 0.010
ANY_PROMPT = Prompt(
    request_id=RequestId(""),
    model="",
    token_ids=(1,),
    sampling=SamplingParams(),
    stop=StopRules(max_tokens=1),
    timeout_s=1,
)
REQUIRED = {64: 55_000, 256: 75_000}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello there"}],
    "stream": True,
    "max_completion_tokens": 100_000_000,
}
BARE_CHUNK = b"data: " + b"x" * 186 + b"\n\n"
"""About as long as a chat chunk."""
ROUTE = "/v1/chat/completions"
PARSED = "/_deepseek"
"""Before the route: the same with DeepSeek's format, whose answers are parsed."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("/_bare", {}),
    "chat": (ROUTE, CHAT),
    "chat, 4 stop strings, usage": (
        ROUTE,
        {
            **CHAT,
            "stop": ["\n\n\n", "<end>", "zzzz", "User:"],
            "stream_options": {"include_usage": True},
        },
    ),
    "chat, continuous usage": (ROUTE, {**CHAT, "stream_options": {"continuous_usage_stats": True}}),
    "DeepSeek reasoning": (PARSED + ROUTE, CHAT),
    "DeepSeek text": (PARSED + ROUTE, {**CHAT, "thinking": {"type": "disabled"}}),
    "DeepSeek text, tools": (PARSED + ROUTE, {**CHAT, "thinking": {"type": "disabled"}, "tools": [WEATHER]}),
}


@dataclass(slots=True, eq=False)
class _Open:
    """One open stream."""

    number: int
    tap: Tap | None
    num_sent: int = 0


class TickingGenerator:
    """One delta of one token per open stream and step."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._deltas = [Delta(token_ids=(token,)) for token in tokens]
        self._waiting: dict[_Open, asyncio.Future[Delta]] = {}
        self._step = 0
        self.num_tokens = 0
        self.num_behind = 0
        """Steps that found a stream still busy with an earlier one."""
        self._num_streams = 0

    def models(self) -> tuple[ServedModel, ...]:
        return (ServedModel(name="tiny", max_tokens_total=2**30, vocab_size=400, eos_token_ids=(2,)),)

    async def generate(self, prompt: Prompt, tap: Tap | None = None) -> AsyncIterator[Delta]:
        number = prompt.sampling.seed % len(self._deltas)
        self._num_streams += 1
        open_stream = _Open(number, tap)
        try:
            while True:
                self._waiting[open_stream] = asyncio.get_running_loop().create_future()
                yield await self._waiting[open_stream]
        finally:
            self._waiting.pop(open_stream, None)
            self._num_streams -= 1

    async def tick(self) -> None:
        """Release one token to every waiting stream, each step."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + STEP_S, loop.time())
            await asyncio.sleep(due - loop.time())
            self._step += 1
            self.num_behind += self._num_streams - len(self._waiting)
            for stream, future in list(self._waiting.items()):
                if future.done():
                    continue
                self.num_tokens += 1
                delta = self._deltas[(stream.number + self._step) % len(self._deltas)]
                # As the orchestrator does it: the first comes through the iterator, the others at once.
                if stream.tap is not None and stream.num_sent:
                    if stream.tap(delta):
                        continue
                    delta = Delta()
                stream.num_sent += 1
                del self._waiting[stream]
                future.set_result(delta)


class Measured:
    """The applications with routes more: the bare stream, and one that tells the CPU time used."""

    def __init__(self, api: Api, parsing: Api, generators: tuple[TickingGenerator, ...]) -> None:
        self._api = api
        self._parsing = parsing
        self._generators = generators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/_"):
            await self._api(scope, receive, send)
        elif scope["path"].startswith(PARSED):
            await self._parsing({**scope, "path": scope["path"].removeprefix(PARSED)}, receive, send)
        elif scope["path"] == "/_bare":
            await self._stream_bare(receive, send)
        else:
            await self._tell_cpu(send)

    async def _stream_bare(self, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._leave(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for _ in self._generators[0].generate(ANY_PROMPT):
            await send({"type": "http.response.body", "body": BARE_CHUNK, "more_body": True})
            if leaving.done():
                return

    @staticmethod
    async def _leave(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _tell_cpu(self, send: Send) -> None:
        num_tokens = sum(generator.num_tokens for generator in self._generators)
        num_behind = sum(generator.num_behind for generator in self._generators)
        body = json.dumps([time.process_time(), num_tokens, num_behind]).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def example_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """English text with a few characters that span tokens."""
    return tokenizer.encode_prompt("The quick brown fox jumps over the lazy dog, said 你好 the end. " * 8)


async def serve(directory: Path) -> None:
    """Serve until stdin closes; prints the port."""
    plain = build_tokenizer(directory / "template")
    (directory / "deepseek").mkdir(exist_ok=True)
    parsed = load_chat(write_trained(directory / "deepseek"))
    apis: list[Api] = []
    generators: list[TickingGenerator] = []
    for tokenizer, chat_format in ((plain, TemplateChat(plain)), parsed):
        generators.append(TickingGenerator(example_tokens(tokenizer)))
        api = build_asgi(
            generators[-1],
            tokenizer,
            chat_format,
            ApiConfig(),
            clock=SystemClock(),
            metrics=HttpMetrics(CollectorRegistry()),
            is_ready=lambda: True,
            unix_time=lambda: 0.0,
        )
        apis.append(api)
    server = HttpServer(Measured(apis[0], apis[1], tuple(generators)), "127.0.0.1", 0)
    await server.start()
    ticking = [asyncio.create_task(generator.tick()) for generator in generators]
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in ticking:
        task.cancel()
    await server.drain(1.0)


async def source_only(directory: Path, num_streams: int, seconds: float) -> float:
    """Tokens per CPU-second of the generator with consumers that do nothing."""
    generator = TickingGenerator(example_tokens(build_tokenizer(directory)))

    async def consume() -> None:
        async for _ in generator.generate(ANY_PROMPT):
            pass

    tasks = [asyncio.create_task(consume()) for _ in range(num_streams)]
    tasks.append(asyncio.create_task(generator.tick()))
    await asyncio.sleep(0.2)
    start, tokens = time.process_time(), generator.num_tokens
    await asyncio.sleep(seconds)
    rate = (generator.num_tokens - tokens) / (time.process_time() - start)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rate


def read_cpu(port: int) -> tuple[float, int, int]:
    """Ask the server for (CPU seconds, tokens, times a stream was behind)."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(b"GET /_cpu HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b""
        while part := link.recv(4096):
            answer += part
    cpu, tokens, behind = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    return cpu, tokens, behind


class Streams:
    """Many open streams in this process, read and counted as cheaply as possible."""

    def __init__(self, port: int, path: str, payload: dict[str, Any], num_streams: int) -> None:
        self._poll = select.epoll()
        self._links: dict[int, socket.socket] = {}
        self._begun: set[int] = set()
        self.num_bytes = 0
        self.num_events = 0
        for number in range(num_streams):
            body = json.dumps({**payload, "seed": number}).encode()
            link = socket.create_connection(("127.0.0.1", port))
            link.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (path.encode(), len(body), body)
            )
            link.setblocking(False)
            self._links[link.fileno()] = link
            self._poll.register(link.fileno(), select.EPOLLIN)

    def read_for(self, seconds: float) -> None:
        """Take what comes for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for number, _ in self._poll.poll(min(left, 0.05)):
                data = self._links[number].recv(1 << 16)
                self.num_bytes += len(data)
                if events := data.count(b"data: "):
                    self.num_events += events
                    self._begun.add(number)

    def all_begun(self, within_s: float) -> None:
        """Read until every stream has its first event; TimeoutError if one has none."""
        end = time.monotonic() + within_s
        while len(self._begun) < len(self._links):
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self._begun)} of {len(self._links)} streams began")
            self.read_for(0.1)

    def close(self) -> None:
        """Leave all streams."""
        for link in self._links.values():
            link.close()
        self._poll.close()


def measure(port: int, case: str, num_streams: int, seconds: float) -> dict[str, float]:
    """One run: open, let all begin, measure, leave."""
    _, tokens_open, _ = read_cpu(port)
    streams = Streams(port, *CASES[case], num_streams)
    try:
        streams.all_begun(60.0)
        streams.read_for(0.5)
        cpu, tokens, behind = read_cpu(port)
        seen_bytes = streams.num_bytes
        streams.read_for(seconds)
        cpu_end, tokens_end, behind_end = read_cpu(port)
    finally:
        streams.close()
    num_tokens = tokens_end - tokens
    # What the client got must be what the server counts: an event a token, but for split characters and the last steps.
    share = streams.num_events / (tokens_end - tokens_open)
    assert 0.85 < share < 1.1, f"{share:.2f} events a token"
    return {
        "tokens_per_cpu_s": num_tokens / (cpu_end - cpu),
        "tokens_per_s": num_tokens / seconds,
        "cpu_share": (cpu_end - cpu) / seconds,
        "bytes_per_token": (streams.num_bytes - seen_bytes) / num_tokens,
        "behind_share": (behind_end - behind) / max(1, num_tokens),
    }


def main() -> None:
    """Measure all cases at both stream counts, interleaved, and print (or record) the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.serve))
        return
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        results: dict[str, Any] = {}
        for num_streams in REQUIRED:
            rate = uvloop.run(source_only(Path(directory), num_streams, 1.0))
            results[f"source only, {num_streams} streams"] = {"tokens_per_cpu_s": rate}
        command = [sys.executable, "-m", "benchmarks.gateway_stream", "--serve", directory]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            runs: dict[str, list[dict[str, float]]] = {}
            for _ in range(arguments.runs):
                for case in CASES:
                    for num_streams in REQUIRED:
                        key = f"{case}, {num_streams} streams"
                        runs.setdefault(key, []).append(measure(port, case, num_streams, arguments.seconds))
        finally:
            server.stdin.close()
            server.wait(10)
    for key, rows in runs.items():
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        rates = [row["tokens_per_cpu_s"] for row in rows]
        results[key] = {**medians, "min": min(rates), "max": max(rates), "runs": len(rows)}
    for key, row in results.items():
        print(f"{key:48s}", "  ".join(f"{name} {value:,.2f}" for name, value in row.items()))
    if arguments.record:
        note = (
            f"required (A17): {REQUIRED}; step {STEP_S * 1000:.0f} ms; medians of interleaved runs; the machine is shared: "
            f"load average {load_before[0]:.1f} before and {os.getloadavg()[0]:.1f} after, so read figures against `bare`"
        )
        print(write_record("gateway_stream", results, note=note))


if __name__ == "__main__":
    main()
