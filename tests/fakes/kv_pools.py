"""KV pools without an engine: layouts, memory with recognisable bytes, and the hosts of both sides of a hand-over.

Both hosts check the rules of page ownership themselves and raise on a breach: they are the oracle of the tests.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.ids import Incarnation, RequestId, fresh_incarnation
from core.kv import Component, ComponentKind, KVLayout, PageRef
from core.request import NO_FLOORS, GenerateRequest, SamplingParams, StopRules
from kv_transfer.api import HOST
from kv_transfer.device import Cuda
from kv_transfer.device_memory import DeviceMemory, allocate_on_device
from kv_transfer.memory import RegionMemory, allocate, region_view
from tests.fakes.fake_cuda import device_bytes

PAGE_TOKENS = 16


def make_layout(
    *, num_pages: int, num_rows: int = 4, page_bytes: int = 1024, index_bytes: int = 96, gap: int = 0, rows: bool = True
) -> KVLayout:
    """Two paged components (the second with `gap` bytes between records) and, with `rows`, a ring and a state."""

    def part(name: str, kind: ComponentKind, region: int, size: int, stride: int, count: int) -> Component:
        return Component(
            name=name,
            kind=kind,
            record_bytes=size,
            num_records=count,
            stride_bytes=stride,
            region=region,
            offset=0,
            layers=("layer.0",),
            heads=2,
            head_dim=8,
            elem="f32",
            capacity_tokens=PAGE_TOKENS if kind is ComponentKind.PAGED else 0,
        )

    parts = [
        part("kv", ComponentKind.PAGED, 0, page_bytes, page_bytes, num_pages),
        part("index", ComponentKind.PAGED, 1, index_bytes, index_bytes + gap, num_pages),
    ]
    if rows:
        parts.append(part("ring", ComponentKind.RING, 2, 160, 160, num_rows))
        parts.append(part("state", ComponentKind.STATE, 3, 48, 64, num_rows))
    return KVLayout(page_tokens=PAGE_TOKENS, components=tuple(parts))


def region_sizes(layout: KVLayout) -> list[int]:
    return [c.offset + c.num_records * c.stride_bytes for c in layout.components]


def record(layout: KVLayout, memory: RegionMemory | DeviceMemory, name: str, index: int) -> np.ndarray:
    """The bytes of one record, as a view, also of one on the fake device."""
    c = layout.component(name)
    start, region = c.offset + index * c.stride_bytes, memory.regions[c.region]
    view = region_view(region) if region.device == HOST else device_bytes(region)
    return view[start : start + c.record_bytes]


def content(key: object, size: int) -> np.ndarray:
    """Bytes that belong to one record of one request and to nothing else."""
    seed = np.frombuffer(repr(key).encode().ljust(8, b"."), np.uint8)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def make_request(num_tokens: int, name: str = "req-1", attempt: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=attempt,
        model="fake",
        token_ids=tuple(range(1, num_tokens + 1)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0),
        stop=StopRules(max_tokens=8),
    )


class Pool:
    """A layout with memory (on a device with `cuda`) and a free list in random order; page 0 is the sink."""

    def __init__(
        self,
        layout: KVLayout,
        directory: str = "",
        incarnation: Incarnation | None = None,
        seed: int = 0,
        cuda: Cuda | None = None,
    ):
        self.layout = layout
        self.incarnation = incarnation or fresh_incarnation()
        self.cuda = cuda
        sizes = region_sizes(layout)
        self.memory = (
            allocate(sizes, incarnation=self.incarnation, directory=directory)
            if cuda is None
            else allocate_on_device(sizes, cuda=cuda, device=0)
        )
        self.num_pages = layout.component("kv").num_records
        self.free = list(range(1, self.num_pages))
        self.epochs = [0] * self.num_pages
        self.random = random.Random(seed)
        self.random.shuffle(self.free)

    def take(self, count: int) -> list[int]:
        assert len(self.free) >= count, "the test's pool is too small"
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.epochs[page] += 1
        return taken

    def give(self, pages: Sequence[int]) -> None:
        assert not set(pages) & set(self.free), "pages were freed twice"
        self.free.extend(pages)
        self.random.shuffle(self.free)

    def bytes_of(self, name: str, index: int) -> np.ndarray:
        return record(self.layout, self.memory, name, index)

    def names(self, *, paged: bool) -> list[str]:
        return [c.name for c in self.layout.components if (c.kind is ComponentKind.PAGED) == paged]


@dataclass
class Prefill:
    """One prompt at the fake source."""

    seq: int
    request: GenerateRequest
    pages: list[int]
    row: int
    epochs: list[int]
    done: int = 0


class FakeSourceHost:
    """Computes prompts by filling pages with `content`; each step is told by the test or by `run`."""

    def __init__(self, pool: Pool, first_token: int = 777) -> None:
        self.pool = pool
        self.source = None
        self.first_token = first_token
        self.prefills: dict[int, Prefill] = {}
        self.started = asyncio.Queue()
        self.stopped: list[int] = []
        self.refuse: TandemError | None = None
        self.keep_events_before_return = False
        self.floors = NO_FLOORS
        """What prompts are said to be computed with."""
        self._next = 1
        self._rows = 0

    async def start(self, request: GenerateRequest, timeout_s: float) -> int:
        if self.refuse is not None:
            raise self.refuse
        seq, self._next = self._next, self._next + 1
        pages = self.pool.take(-(-len(request.token_ids) // PAGE_TOKENS))
        num_rows = self.pool.layout.components[-1].num_records
        self._rows += 1
        prefill = Prefill(seq, request, pages, self._rows % num_rows, [self.pool.epochs[p] for p in pages])
        self.prefills[seq] = prefill
        self.started.put_nowait(prefill)
        return seq

    def stop(self, seq: int) -> None:
        prefill = self.prefills.pop(seq, None)
        self.stopped.append(seq)
        if prefill is not None:
            self.pool.give(prefill.pages)

    def epochs_unchanged(self, seq: int) -> bool:
        prefill = self.prefills.get(seq)
        return prefill is not None and prefill.epochs == [self.pool.epochs[p] for p in prefill.pages]

    def compute(self, prefill: Prefill, upto: int) -> None:
        """Fill pages up to a token position and tell the source."""
        for index in range(prefill.done // PAGE_TOKENS, -(-upto // PAGE_TOKENS)):
            for name in self.pool.names(paged=True):
                view = self.pool.bytes_of(name, prefill.pages[index])
                view[:] = content((prefill.request.request_id, name, index), len(view))
        start, prefill.done = prefill.done, upto
        first, last = start // PAGE_TOKENS, -(-upto // PAGE_TOKENS)
        refs = tuple(PageRef(p, self.pool.epochs[p]) for p in prefill.pages[first:last])
        self.source.chunk_final(prefill.seq, start, upto, refs, self.floors.hits)

    def finish(self, prefill: Prefill, finish: str = "") -> None:
        """Fill the row and tell the source that the prompt is done."""
        for name in self.pool.names(paged=False):
            view = self.pool.bytes_of(name, prefill.row)
            view[:] = content((prefill.request.request_id, name), len(view))
        self.source.prefilled(
            prefill.seq,
            num_tokens=len(prefill.request.token_ids),
            first_tokens=(self.first_token,),
            logprobs=(TokenLogprobs(token=self.first_token, logprob=-0.5),),
            num_cached_tokens=0,
            finish=finish,
            row=prefill.row,
            row_generation=1,
            floors=self.floors,
        )

    async def run(self, chunk_tokens: int = 64) -> None:
        """Compute every prompt that starts, chunk by chunk, for ever."""
        while True:
            prefill = await self.started.get()
            for upto in range(chunk_tokens, len(prefill.request.token_ids) + chunk_tokens, chunk_tokens):
                if prefill.seq in self.prefills:
                    self.compute(prefill, min(upto, len(prefill.request.token_ids)))
                await asyncio.sleep(0)
            if prefill.seq in self.prefills:
                self.finish(prefill)


@dataclass
class Landing:
    """One sequence at the fake destination."""

    pages: dict[int, int] = field(default_factory=dict)
    """page index in the sequence -> page"""


class FakeDestinationHost:
    """Allocates landing pages and checks drop and prove."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.landings: dict[int, Landing] = {}
        self.unproven: set[int] = set()
        self.dropped: list[int] = []
        self.before_land: Callable[[], object] | None = None
        self.room = asyncio.Event()
        self.room.set()

    async def land(self, seq: int, start: int, end: int) -> tuple[int, ...]:
        if self.before_land is not None:
            self.before_land()
        await self.room.wait()
        landing = self.landings.setdefault(seq, Landing())
        indices = range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS))
        assert not set(indices) & set(landing.pages), "the same pages were asked for twice"
        pages = self.pool.take(len(indices))
        landing.pages.update(zip(indices, pages, strict=True))
        return tuple(pages)

    def drop(self, seq: int, open_pages: Sequence[int]) -> None:
        assert seq not in self.dropped, "drop was called twice"
        self.dropped.append(seq)
        own = set(self.landings.pop(seq, Landing()).pages.values())
        assert set(open_pages) <= own
        self.unproven |= set(open_pages)
        self.pool.give(sorted(own - set(open_pages)))

    def prove(self, pages: Sequence[int]) -> None:
        assert set(pages) <= self.unproven, "pages were proven that were not in doubt"
        self.unproven -= set(pages)
        self.pool.give(pages)

    def assert_landed(self, seq: int, request: GenerateRequest, row: int, first_page: int = 0) -> None:
        """Every record of the sequence holds what the source computed for it."""
        self.assert_landed_pages(seq, request, first_page)
        for name in self.pool.names(paged=False):
            view = self.pool.bytes_of(name, row)
            assert np.array_equal(view, content((request.request_id, name), len(view))), name

    def assert_landed_pages(self, seq: int, request: GenerateRequest, first_page: int = 0) -> None:
        landing = self.landings[seq]
        assert sorted(landing.pages) == list(range(first_page, -(-len(request.token_ids) // PAGE_TOKENS)))
        for index, page in landing.pages.items():
            for name in self.pool.names(paged=True):
                view = self.pool.bytes_of(name, page)
                assert np.array_equal(view, content((request.request_id, name, index), len(view))), (name, index)

    def release(self, seq: int) -> None:
        """The sequence ended after its commit."""
        self.pool.give(list(self.landings.pop(seq).pages.values()))

    @property
    def is_whole(self) -> bool:
        """True if every page but the sink is free."""
        return sorted(self.pool.free) == list(range(1, self.pool.num_pages)) and not self.unproven
