"""What open streams cost a gateway process in memory: RSS with none, and with N that wait for their next token.

`python -m benchmarks.gateway_memory [N]` writes `benchmarks/results/gateway_idle_streams.json`. The workers are
simulated processes (`tests.fakes.sim_worker`) that send one token and then nothing.
"""

import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.record import write_record
from tests.fakes.sim_cluster import body, sim_cluster

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
            await cluster.settled("gateway-1", "in_flight", 0, timeout_s=30)
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


def main() -> int:
    """Measure and record."""
    result = asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
    write_record("gateway_idle_streams", result, note="one gateway process, simulated workers; RSS by psutil")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
