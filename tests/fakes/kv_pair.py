"""One source and one destination in this process, over a chosen transport: what most hand-over tests start from."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from core.aio import OnCrash
from core.clock import Clock, SystemClock
from core.kv import KVLayout
from core.request import GenerateRequest
from kv_transfer.api import FirstTokens, Pulled, TransportOpener
from kv_transfer.config import TransferConfig
from kv_transfer.destination import Destination
from kv_transfer.device import Cuda
from kv_transfer.exchange import Exchange
from kv_transfer.factory import TransportFactory
from kv_transfer.local_link import LocalDialer
from kv_transfer.settings import TransportSettings
from kv_transfer.source import Source
from tests.fakes.kv_pools import FakeDestinationHost, FakeSourceHost, Pool, make_layout

ADDRESS = "source:1"
FINGERPRINT = b"fingerprint"


@dataclass
class Pair:
    source: Source
    source_host: FakeSourceHost
    destination: Destination
    host: FakeDestinationHost
    dialer: LocalDialer
    exchange: Exchange
    config: TransferConfig
    firsts: list[FirstTokens] = field(default_factory=list)

    @property
    def bytes_landed(self) -> int:
        """Bytes of hand-overs that arrived, over whatever transport."""
        found = self.destination.statistics()
        return int(sum(value for name, value in found.items() if name.startswith("bytes_landed_")))

    async def pull(self, request: GenerateRequest, seq: int = 1, **changes) -> Pulled:
        """Pull with defaults."""
        arguments = {
            "request": request,
            "seq": seq,
            "row": 1,
            "prefix_tokens": 0,
            "address": ADDRESS,
            "incarnation": None,
            "timeout_s": 20.0,
            "on_first": self.firsts.append,
        } | changes
        return await self.destination.pull(**arguments)

    async def settled(self) -> None:
        """Wait until nothing is held without proof at D and no lease is left at P."""
        async with asyncio.timeout(30):
            while self.host.unproven or self.source.num_leases or self.destination.statistics()["open_ops"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def quick(**changes) -> TransferConfig:
    """A configuration that waits less."""
    return msgspec.structs.replace(TransferConfig(sweep_interval_s=0.01, drain_timeout_s=5.0), **changes)


@asynccontextmanager
async def open_pair(
    transport: str,
    directory: str,
    *,
    config: TransferConfig | None = None,
    source_layout: KVLayout | None = None,
    target_layout: KVLayout | None = None,
    exchange: Exchange | None = None,
    source_clock: Clock | None = None,
    opener: TransportOpener | None = None,
    computing: bool = True,
    chunk_tokens: int = 64,
    on_crash: OnCrash | None = None,
    source_cuda: Cuda | None = None,
    target_cuda: Cuda | None = None,
) -> AsyncIterator[Pair]:
    """Compose both sides; closes them, and fails if the destination's pages do not come home."""
    config = msgspec.structs.replace(config or quick(), transports=(transport,), segment_directory=directory)
    exchange = exchange or Exchange()
    clock = SystemClock()
    rows = (source_layout or target_layout) is None or (source_layout or target_layout).has_row_state
    theirs = Pool(source_layout or make_layout(num_pages=64, gap=32, rows=rows), directory, seed=1, cuda=source_cuda)
    ours = Pool(target_layout or make_layout(num_pages=96, rows=rows), seed=2, cuda=target_cuda)
    source_host, host, dialer = FakeSourceHost(theirs), FakeDestinationHost(ours), LocalDialer()

    def factory(pool: Pool) -> TransportFactory:
        settings = TransportSettings(pool.incarnation, config, exchange, pool.cuda)
        return TransportFactory(settings, pool.memory.regions, clock)

    source = Source(
        config=config,
        incarnation=theirs.incarnation,
        fingerprint=FINGERPRINT,
        layout=theirs.layout,
        regions=theirs.memory.regions,
        host=source_host,
        opener=factory(theirs),
        clock=source_clock or clock,
        on_crash=on_crash,
        cuda=source_cuda,
    )
    source_host.source = source
    destination = Destination(
        config=config,
        incarnation=ours.incarnation,
        fingerprint=FINGERPRINT,
        layout=ours.layout,
        regions=ours.memory.regions,
        host=host,
        dialer=dialer,
        opener=opener or factory(ours),
        clock=clock,
        on_crash=on_crash,
        cuda=target_cuda,
    )
    await source.start()
    dialer.serve(ADDRESS, source)
    work = asyncio.create_task(source_host.run(chunk_tokens)) if computing else None
    try:
        yield Pair(source, source_host, destination, host, dialer, exchange, config)
    finally:
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await destination.close()
        await source.close()
        theirs.memory.close()
        ours.memory.close()
