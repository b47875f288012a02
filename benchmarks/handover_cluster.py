"""Clusters of `tandem up` for a measurement: started side by side, asked over HTTP, looked into over the workers' own calls."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import TandemError
from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from deploy.local.control import ask as ask_launcher

ROOT = Path(__file__).parents[1]
LEFT_OVERS = (
    "engine_pages_private",
    "engine_pages_landing",
    "engine_pages_unproven",
    "engine_pages_fenced",
    "engine_rows_used",
    "transfer_leases",
    "transfer_open_ops",
    "worker_requests_live",
)
"""Statistics that are 0 in a worker at rest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion. Times are seconds since the request was sent."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    times: tuple[float, ...]
    """When each token came."""
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(slots=True)
class Cluster:
    """One `tandem up` in a directory of its own, from `start` to `stop`."""

    name: str
    model: str
    flags: Sequence[str]
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    address: str = ""
    began: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Begin; `wait` returns when it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "deploy.cli", "up", "--run-dir", str(self.directory), "--port", "0"]
        command += ["--model", self.model, *self.flags]
        self.began = time.monotonic()
        with (self.directory / "up.log").open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)

    def wait(self, deadline: float) -> None:
        """Wait until it serves; raises RuntimeError with the last lines of its logs if it does not by `deadline`."""
        assert self.process is not None
        while True:
            text = (self.directory / "up.log").read_text()
            if "serving " in text and "http://" in text:
                self.address = str(self.status()["http_address"])
                return
            if time.monotonic() >= deadline or self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not serve:\n{self.last_lines()}")

    def last_lines(self, count: int = 25) -> str:
        """Return the end of every log, for people."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-count:]) for log in logs)

    def grep(self, word: str) -> list[str]:
        """Return the lines of all logs that hold a word."""
        return [
            line
            for log in sorted(self.directory.glob("*.log"))
            for line in log.read_text().splitlines()
            if word in line
        ]

    def status(self) -> dict[str, Any]:
        """Return what the launcher says of its processes."""
        return dict(ask_launcher(self.directory, {"command": "status"}, lambda _: None, 30.0))

    def pid(self, worker_id: str) -> int:
        """Return the process of a worker."""
        return next(int(p["pid"]) for p in self.status()["processes"] if p["id"] == worker_id)

    async def ready_again(self, worker_id: str, timeout_s: float) -> None:
        """Wait until a worker that was killed serves again; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not any(p["id"] == worker_id and p["state"] == "ready" for p in self.status()["processes"]):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.3)

    def kill(self, worker_id: str) -> None:
        """``kill -9`` one of our workers."""
        os.kill(self.pid(worker_id), signal.SIGKILL)

    async def statistics(self, *, audit: bool = False) -> dict[str, dict[str, float]]:
        """Return each ready worker's numbers by its id; with `audit` findings raise RuntimeError."""
        proof = Proof((self.directory / "secret").read_bytes(), fresh_incarnation())
        client, found = AdminClient(proof), {}
        for process in self.status()["processes"]:
            if process["role"] in ("prefill", "decode") and process["state"] == "ready":
                answer = await client.statistics(str(process["address"]), audit=audit)
                if answer.audit_findings:
                    raise RuntimeError(f"{process['id']}: {answer.audit_findings}")
                found[str(process["id"])] = dict(answer.values)
        return found

    async def settled(self, timeout_s: float = 20.0) -> dict[str, dict[str, float]]:
        """Wait until every worker holds nothing but free and cached pages; raises RuntimeError with what is left."""
        end, left = time.monotonic() + timeout_s, {}
        while time.monotonic() < end:
            try:
                found = await self.statistics(audit=True)
            except (RuntimeError, TandemError) as error:
                left = {"": str(error)}
            else:
                left = {w: {n: v[n] for n in LEFT_OVERS if v.get(n)} for w, v in found.items()}
                if not any(left.values()):
                    return found
            await asyncio.sleep(0.2)
        raise RuntimeError(f"{self.name} does not settle: {left}")

    def stop(self) -> None:
        """End it; kills what does not leave in time."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def body_of(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return a greedy request whose answer tells each token."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 0,
    }


async def ask(
    address: str, body: Mapping[str, Any], timeout_s: float = 120.0, on_first: Callable[[], None] | None = None
) -> Answer:
    """Send one request and read its stream to the end; a failure is told in the answer.

    `on_first` is called with the first token.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    times: list[float] = []
    started = time.perf_counter()

    def take(event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(json.dumps(event["error"]))
        for choice in event.get("choices", ()):
            found = choice.get("logprobs") or {}
            tokens.extend(found.get("tokens") or ())
            logprobs.extend(found.get("token_logprobs") or ())
            if tokens and not times and on_first is not None:
                on_first()
            times.extend([time.perf_counter() - started] * len(found.get("tokens") or ()))

    try:
        async with asyncio.timeout(timeout_s):
            async for line in lines(address, json.dumps(body).encode()):
                if line.startswith(b"data: {"):
                    take(json.loads(line[6:]))
    except (RuntimeError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        return Answer(tuple(tokens), tuple(logprobs), tuple(times), error=f"{type(error).__name__}: {error}"[:500])
    return Answer(tuple(tokens), tuple(logprobs), tuple(times))


async def lines(address: str, body: bytes):  # noqa: ANN201 - an async generator of bytes
    """POST to /v1/completions and yield the answer's lines as they come; raises RuntimeError for a status other than 200."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readline()
        chunked, length = False, 0
        while (field_line := (await reader.readline()).strip().lower()) != b"":
            chunked |= field_line == b"transfer-encoding: chunked"
            length = int(field_line.split(b":")[1]) if field_line.startswith(b"content-length:") else length
        if b" 200 " not in status:
            text = await (reader.readexactly(length) if length else reader.read(4096))
            raise RuntimeError(f"{status.decode().strip()}: {text.decode(errors='replace')[:300]}")
        rest = b""
        while chunked and (size := int(await reader.readline(), 16)):
            rest += (await reader.readexactly(size + 2))[:-2]
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield line
    finally:
        writer.close()
