"""What a gateway process holds in memory: what open streams cost it, and whether an hour of traffic leaves anything.

`python -m benchmarks.gateway_memory [N]` writes `benchmarks/results/gateway_idle_streams.json`: RSS with no stream, and
with N that wait for their next token. `python -m benchmarks.gateway_memory replay [REQUESTS]` writes
`gateway_replay_memory.json`: RSS while so many requests (an hour at ten a second) go through as fast as they can: chats
with texts of their own, agents' sessions that grow, token ids, streams and whole answers, clients that leave in the
middle, a worker that restarts. The workers are simulated processes (`tests.fakes.sim_worker`).
"""

import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.record import write_record
from tests.fakes.cluster import MODEL
from tests.fakes.sim_cluster import SimCluster, body, sim_cluster

GOAL_BYTES = 100 << 20


async def open_stream(url: str, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream and wait until it has begun."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body((3 + number % 300, 7, number % 11), max_tokens=1000)).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    await reader.readuntil(b"\r\n\r\n")  # headers go out with the first token
    return reader, writer


async def measure(num_streams: int) -> dict[str, object]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {"plan": "tokens:1 wait:100000000", "plan_requests": 10 * num_streams, "num_rows": 4 * num_streams}
        gateway = {"limits.max_in_flight": 4 * num_streams, "access.log": "false"}
        async with sim_cluster(Path(directory), "p1", "d1", gateway=gateway, step_s=0.05, **settings) as cluster:
            process = psutil.Process(cluster.gateway.process.pid)
            # The first request pays for what all share: caches, code, the tokenizer's tables.
            _, warm = await open_stream(cluster.url, 0)
            idle = process.memory_info().rss
            streams = []
            for start in range(0, num_streams, 50):
                streams += await asyncio.gather(*(open_stream(cluster.url, start + k) for k in range(50)))
            await cluster.settled("gateway-1", "in_flight", num_streams + 1)
            gc.collect()
            held = process.memory_info().rss
            before = process.cpu_times()
            await asyncio.sleep(5)
            after = process.cpu_times()
            for _, writer in [*streams, (None, warm)]:
                writer.close()
            await cluster.settled("gateway-1", "in_flight", 0)
            return {
                "streams": num_streams,
                "rss_idle_bytes": idle,
                "rss_with_streams_bytes": held,
                "bytes_for_all_streams": held - idle,
                "bytes_per_stream": round((held - idle) / num_streams),
                "rss_after_they_left_bytes": process.memory_info().rss,
                "idle_cpu_share": round((after.user + after.system - before.user - before.system) / 5, 4),
                "goal_bytes_for_1000": GOAL_BYTES,
            }


HOUR = 36_000
"""Requests of an hour at ten a second."""
CLIENTS = 48
SESSIONS = 150
SHARE_LEFT, SHARE_SESSION, SHARE_IDS = 0.05, 0.3, 0.3
WARM = 0.4
"""Share of the requests that fill the bounded caches (the last decisions, segments, pages, sessions)."""
WORDS = ("time", "people", "way", "water", "words", "called", "number", "sound", "place", "years", "work", "good")


class Replay:
    """Clients that ask until so many requests were answered, each on a connection of its own."""

    def __init__(self, address: str, requests: int) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self.left = requests
        self._half = requests // 2
        self.half_done = asyncio.Event()
        self.done = 0
        self.gone = 0
        self.failed: dict[str, int] = {}
        self._dice = random.Random(11)
        self._sessions = ["" for _ in range(SESSIONS)]

    async def run(self) -> None:
        """Return when all requests are answered."""
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    def _request(self) -> tuple[bytes, bool]:
        """Return the next request and whether its client leaves in the middle."""
        dice = self._dice
        kind, stream = dice.random(), dice.random() < 0.7
        leaves = stream and dice.random() < SHARE_LEFT
        fields: dict[str, Any] = {"max_tokens": 200 if leaves else dice.randint(1, 24), "stream": stream}
        headers, path = "", "/v1/chat/completions"
        if kind < SHARE_IDS:
            path = "/v1/completions"
            payload = body([dice.randrange(3, 300) for _ in range(dice.randint(8, 200))], **fields)
            if not stream:
                del payload["stream_options"]
        else:
            text = " ".join(dice.choices(WORDS, k=dice.randint(10, 80)))
            if kind < SHARE_IDS + SHARE_SESSION:
                number = dice.randrange(SESSIONS)
                # A session grows by turns, and begins anew when it is long.
                text = self._sessions[number] = f"{self._sessions[number][:4000]} {text}"[-5000:]
                headers = f"x-session-affinity: agent-{number}\r\n"
            payload = {"model": MODEL, "messages": [{"role": "user", "content": text}], "ignore_eos": True, **fields}
        raw = json.dumps(payload).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw, leaves

    async def _client(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        while self.left > 0:
            self.left -= 1
            if self.left <= self._half:
                self.half_done.set()
            request, leaves = self._request()
            writer.write(request)
            if leaves:
                await reader.read(600)
                writer.close()
                self.gone += 1
                reader, writer = await asyncio.open_connection(*self._address)
                continue
            head = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in head.lower():
                while await reader.readuntil(b"\r\n") != b"0\r\n":
                    await reader.readuntil(b"\r\n")
                await reader.readuntil(b"\r\n")
            else:
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
            self.done += 1
            if not head.startswith(b"HTTP/1.1 200"):
                status = head[9:12].decode()
                self.failed[status] = self.failed.get(status, 0) + 1
        writer.close()


async def restart_worker(cluster: SimCluster, replay: Replay) -> None:
    """Kill a decode worker when half of the requests are answered, and start it again."""
    await replay.half_done.wait()
    await cluster.children["d2"].kill()
    await cluster.children["d2"].start()


async def measure_replay(requests: int) -> dict[str, object]:
    """Return the figures of one replay."""
    with tempfile.TemporaryDirectory() as directory:
        gateway = {"access.log": "false", "limits.max_queued": 10_000, "log_level": "WARNING"}
        # Room for all sessions: who has to wait for room asks less often, and the hour would be one of waiting.
        settings = {"num_pages": 20_000, "step_s": 0.002}
        async with sim_cluster(Path(directory), "p1", "d1", "d2", gateway=gateway, **settings) as cluster:
            process = psutil.Process(cluster.gateway.process.pid)
            replay = Replay(cluster.gateway.facts["http_address"], requests)
            begun, rows = time.monotonic(), list[tuple[int, int]]()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(replay.run())
                group.create_task(restart_worker(cluster, replay))
                while not running.done():
                    rows.append((replay.done, process.memory_info().rss))
                    await asyncio.sleep(1.0)
            wall = time.monotonic() - begun
            await cluster.settled("gateway-1", "in_flight", 0)
            leases = {
                name: value for name, value in (await cluster.statistics("gateway-1")).items() if "leases" in name
            }
            rss_after = process.memory_info().rss
    done, rss = np.array(rows, dtype=np.float64).T
    late = done >= WARM * requests
    slope = float(np.polyfit(done[late], rss[late], 1)[0])
    return {
        "requests": replay.done,
        "left_in_the_middle": replay.gone,
        "answers_other_than_200": replay.failed,
        "seconds": round(wall, 1),
        "rss_at_start_bytes": int(rss[0]),
        "rss_when_warm_bytes": int(rss[late][0]),
        "rss_at_end_bytes": rss_after,
        "rss_most_bytes": int(rss.max()),
        "slope_bytes_per_request": round(slope, 1),
        "slope_bytes_per_hour": round(slope * HOUR),
        "leases_at_end": leases,
        "rss_by_requests": [[int(at), int(held)] for at, held in rows[:: max(1, len(rows) // 40)]],
    }


def main() -> int:
    """Measure and record."""
    words = sys.argv[1:]
    if words[:1] == ["replay"]:
        result = asyncio.run(measure_replay(int(words[1]) if len(words) > 1 else HOUR))
        note = f"one gateway process, three simulated workers; RSS by psutil; load average {os.getloadavg()[0]:.1f} at the end"
        write_record("gateway_replay_memory", result, note=note)
    else:
        result = asyncio.run(measure(int(words[0]) if words else 1000))
        write_record("gateway_idle_streams", result, note="one gateway process, simulated workers; RSS by psutil")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
