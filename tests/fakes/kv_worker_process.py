"""One side of hand-overs as a process of its own, over real gRPC, to be killed, stopped and asked: no engine, no torch.

    python -m tests.fakes.kv_worker_process source TRANSPORT DIRECTORY OPTIONS
    python -m tests.fakes.kv_worker_process destination TRANSPORT DIRECTORY OPTIONS

OPTIONS is JSON. A source prints {address, incarnation} and then answers each line of its standard input with a line of
JSON; a destination pulls from {address} for ever and prints what came of each pull.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from core.clock import SystemClock
from core.errors import TandemError
from core.ids import Incarnation
from core.rpc.kv_source import KvSourceDialer, add_kv_source
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from kv_transfer.config import TransferConfig
from kv_transfer.destination import Destination
from kv_transfer.factory import TransportFactory
from kv_transfer.settings import TransportSettings
from kv_transfer.source import Source
from tests.fakes.kv_pools import FakeDestinationHost, FakeSourceHost, Pool, make_layout, make_request

ROOT = Path(__file__).resolve().parents[2]
SECRET = b"a secret for tests only"
FINGERPRINT = b"fingerprint"
LAYOUT = {"page_bytes": 1024}


def transfer_config(transport: str, directory: str, **changes) -> TransferConfig:
    """Waits that suit a test on a loaded machine, unless changed."""
    values = {
        "transports": (transport,),
        "segment_directory": directory,
        "sweep_interval_s": 0.02,
        "drain_timeout_s": 5.0,
        "digests": True,
    } | changes
    return msgspec.convert(values, TransferConfig)


class SourceSide:
    """A source over gRPC and its fake engine; computes by itself, or when told (`manual`)."""

    def __init__(self, transport: str, directory: str, *, port: int = 0, num_pages: int = 128, **options) -> None:
        config = transfer_config(transport, directory, **options.get("config", {}))
        self.port = port
        self.manual = options.get("manual", False)
        layout = make_layout(num_pages=num_pages, gap=32, **(LAYOUT | options.get("layout", {})))
        self.pool = Pool(layout, directory, seed=1)
        self.host = FakeSourceHost(self.pool)
        self.source = Source(
            config=config,
            incarnation=self.pool.incarnation,
            fingerprint=FINGERPRINT,
            layout=self.pool.layout,
            regions=self.pool.memory.regions,
            host=self.host,
            opener=TransportFactory(
                TransportSettings(self.pool.incarnation, config), self.pool.memory.regions, SystemClock()
            ),
            clock=SystemClock(),
        )
        self.host.source = self.source
        self.server = RpcServer(Proof(SECRET, self.pool.incarnation))
        self.address = ""
        self._work: asyncio.Task | None = None

    async def start(self) -> None:
        await self.source.start()
        add_kv_source(self.server, self.source)
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', self.port)}"
        self._work = asyncio.create_task(self._compute())

    async def _compute(self) -> None:
        if not self.manual:
            await self.host.run(64)

    def do(self, command: str, *arguments: str) -> object:
        """Carry out one command of a test."""
        prefills = list(self.host.prefills.values())
        if command == "compute":
            self.host.compute(prefills[-1], int(arguments[0]))
        elif command == "finish":
            if prefills[-1].done < len(prefills[-1].request.token_ids):
                self.host.compute(prefills[-1], len(prefills[-1].request.token_ids))
            self.host.finish(prefills[-1])
        elif command == "spoil":
            # After the digest was taken: what a wild write does.
            self.pool.bytes_of("kv", prefills[-1].pages[0])[5] ^= 1
        elif command == "reuse":
            self.pool.epochs[prefills[-1].pages[0]] += 1
        elif command == "manual":
            self.manual = True
            assert self._work is not None
            self._work.cancel()
        elif command == "auto":
            self.manual = False
            self._work = asyncio.create_task(self._compute())
        elif command == "drain":
            self.source.drain()
        return {
            "prefills": len(prefills),
            "free": len(self.pool.free),
            "pages": self.pool.num_pages - 1,
            **self.source.statistics(),
        }

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
        await self.source.close()
        await self.server.stop(0)
        self.pool.memory.close()


class DestinationSide:
    """A destination over gRPC with the pages that it lands in."""

    def __init__(self, transport: str, directory: str, *, num_pages: int = 192, wrap=None, **options) -> None:
        self.config = transfer_config(transport, directory, **options.get("config", {}))
        self.pool = Pool(make_layout(num_pages=num_pages, **(LAYOUT | options.get("layout", {}))), seed=2)
        self.host = FakeDestinationHost(self.pool)
        self.firsts: list[object] = []
        dialer = KvSourceDialer(Proof(SECRET, self.pool.incarnation))
        self.destination = Destination(
            config=self.config,
            incarnation=self.pool.incarnation,
            fingerprint=FINGERPRINT,
            layout=self.pool.layout,
            regions=self.pool.memory.regions,
            host=self.host,
            dialer=wrap(dialer) if wrap else dialer,
            opener=TransportFactory(
                TransportSettings(self.pool.incarnation, self.config), self.pool.memory.regions, SystemClock()
            ),
            clock=SystemClock(),
        )

    async def pull(self, address: str, tokens: int, seq: int, **changes):
        """Pull a prompt of that many tokens as sequence `seq`."""
        name = changes.pop("name", f"req-{seq}")
        arguments = {
            "request": make_request(tokens, name, changes.pop("attempt", 0)),
            "seq": seq,
            "row": seq % 4,
            "prefix_tokens": 0,
            "address": address,
            "incarnation": None,
            "timeout_s": 30.0,
            "on_first": self.firsts.append,
        } | changes
        return await self.destination.pull(**arguments)

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is in doubt."""
        async with asyncio.timeout(timeout_s):
            while self.host.unproven or self.destination.statistics()["open_ops"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.destination.close()
        self.pool.memory.close()


@contextlib.asynccontextmanager
async def opened(side):
    """Close a side whatever happens."""
    if isinstance(side, SourceSide):
        await side.start()
    try:
        yield side
    finally:
        await side.close()


async def lines_of_input() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


async def be_source(transport: str, directory: str, options: dict) -> None:
    async with opened(SourceSide(transport, directory, **options)) as side:
        print(json.dumps({"address": side.address, "incarnation": side.pool.incarnation}), flush=True)
        async for line in lines_of_input():
            print(json.dumps(side.do(*line.split())), flush=True)


async def be_destination(transport: str, directory: str, options: dict) -> None:
    address, tokens = options.pop("address"), options.pop("tokens", 400)
    async with opened(DestinationSide(transport, directory, **options)) as side:
        for seq in range(1, 10_000):
            print(json.dumps({"begun": seq}), flush=True)
            try:
                await side.pull(address, tokens, seq)
            except TandemError as error:
                print(json.dumps({"seq": seq, "error": error.code}), flush=True)
                await asyncio.sleep(0.05)
                continue
            side.host.assert_landed(seq, make_request(tokens, f"req-{seq}"), seq % 4)
            side.host.release(seq)
            print(json.dumps({"seq": seq, "landed": True}), flush=True)


class Child:
    """A process that this test started, and its signals."""

    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self.process = process
        self.address = ""
        self.incarnation = Incarnation("")

    async def line(self, timeout_s: float = 60.0) -> dict:
        async with asyncio.timeout(timeout_s):
            data = await self.process.stdout.readline()
        assert data, f"the process ended with {await self.process.wait()}"
        return json.loads(data)

    async def ask(self, *words: object) -> dict:
        """Give a source one command and return its state after it."""
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        await self.process.stdin.drain()
        return await self.line()

    async def until(self, condition, timeout_s: float = 60.0) -> dict:
        """Ask a source for its state until it is as wanted."""
        async with asyncio.timeout(timeout_s):
            while not condition(state := await self.ask("state")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return state

    async def whole(self) -> dict:
        """Wait until a source has given every lease and page back."""
        return await self.until(lambda state: not state["leases"] and state["free"] == state["pages"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def close(self) -> None:
        if self.kind == "destination" and self.process.returncode is None:
            await self.kill()
        if self.process.returncode is None:
            self.resume()
            self.process.stdin.close()
            try:
                async with asyncio.timeout(30):
                    await self.process.wait()
            except TimeoutError:
                await self.kill()


@contextlib.asynccontextmanager
async def child(kind: str, transport: str, directory: str, **options) -> AsyncIterator[Child]:
    """Start a side as a process; a source has said who it is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.fakes.kv_worker_process", kind, transport, directory, json.dumps(options)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    made = Child(kind, process)
    try:
        if kind == "source":
            told = await made.line()
            made.address, made.incarnation = told["address"], Incarnation(told["incarnation"])
        yield made
    finally:
        await made.close()


if __name__ == "__main__":
    run = be_source if sys.argv[1] == "source" else be_destination
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(run(sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
