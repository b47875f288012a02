"""Verify steps and drafts that a GPU repeats from recordings: issuing their kernels one by one takes ten times as long.

A recording has room for a number of rows (a power of two) with one block of drafts each; fewer rows and shorter runs are
padded. It is made when its size is first met; all share one memory pool. Inputs go to the device in one copy. Used by one
executor thread. Knows no acceptance rule.

Shape legend: b rows, t tokens, k drafts, V vocabulary, d hidden.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DeviceRows, ForwardBatch
from engine.models.drafter import Captures

logger = logging.getLogger(__name__)

I64 = npt.NDArray[np.int64]
Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Returns what repeats some work, which reads and writes tensors that stay where they are; nothing of it need run now."""
Forward = Callable[[ForwardBatch], tuple[torch.Tensor, Captures]]
_LEAST_PAGES = 16
_ALIGNED = 2
"""Inputs begin at multiples of so many values: kernels are compiled once for addresses divisible by 16, once for others."""


_pool = functools.cache(torch.cuda.graph_pool_handle)
"""The memory that all recordings of a process take turns with: what one leaves there, nobody reads."""


def record_on_gpu(work: Work) -> Work:
    """Capture work into a CUDA graph, after one run that compiles what has to be. It leaves results elsewhere."""
    begun = time.perf_counter()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile: transfers do.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        work()
    logger.info("recorded steps of a further size in %.1f s", time.perf_counter() - begun)
    return graph.replay


def tier_of(count: int) -> int:
    """Return the power of two that is not below a positive count."""
    return 1 << (count - 1).bit_length()


class Inputs:
    """Integers of a recording's inputs, side by side on the device; set in one copy."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self._rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        self._held = torch.zeros(sum(self._rooms), dtype=torch.int64, device=device)
        rooms = self._held.split(self._rooms)
        self.parts = tuple(part[:size] for part, size in zip(rooms, sizes, strict=True))
        """int64 views, one per size."""

    def set(self, *values: I64) -> None:
        """Put values [n] with n at most their size, padded as they come: the caller pads what must not be zero."""
        host = np.zeros(len(self._held), np.int64)
        at = 0
        for room, part in zip(self._rooms, values, strict=True):
            host[at : at + len(part)] = part
            at += room
        self._held.copy_(torch.from_numpy(host))


@dataclass(frozen=True, slots=True)
class _Size:
    rows: int
    each: int
    """Tokens per row at most."""
    pages: int
    fixed: bool


class _Verify:
    """One recording of the target's forward."""

    def __init__(self, size: _Size, batch: ForwardBatch, forward: Forward, device: torch.device, vocab: int) -> None:
        self.size = size
        rows, tokens = size.rows, size.rows * size.each
        self._width = 0 if batch.history is None else batch.history.shape[1]
        sizes = (rows, rows + 1, rows, tokens, tokens, tokens, rows * size.pages, rows * self._width)
        self._inputs = Inputs(sizes, device)
        self.logits = torch.zeros(tokens, vocab, device=device)
        self._template = batch
        self._forward = forward
        self.replay: Work = self.run

    def run(self) -> None:
        """Compute what the inputs say."""
        rows, q_start, start, ids, positions, slots, pages, history = self._inputs.parts
        size, nothing = self.size, np.zeros(0, np.int32)
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions,
            slots=slots,
            page_table=pages.view(size.rows, size.pages).int(),
            rows=nothing,
            q_start=nothing,
            seq_start=nothing,
            sample_at=torch.arange(len(ids), device=ids.device),
            page_tokens=self._template.page_tokens,
            deterministic=size.fixed,
            history=history.view(size.rows, self._width) if self._width else None,
            device_rows=DeviceRows(
                rows.int(), q_start.int(), start.int(), size.each, size.pages * self._template.page_tokens
            ),
        )
        self.logits.copy_(self._forward(batch)[0])

    def put(self, batch: ForwardBatch) -> None:
        """Take a batch on the host, padded."""
        size, table = self.size, batch.page_table.numpy()
        tokens = size.rows * size.each
        pages = np.zeros((size.rows, size.pages), np.int64)
        pages[: len(table), : table.shape[1]] = table
        q_start = np.full(size.rows + 1, batch.q_start[-1], np.int64)
        q_start[: len(batch.q_start)] = batch.q_start
        slots = np.full(tokens, -1, np.int64)
        slots[: len(batch.slots)] = batch.slots.numpy()
        history = np.zeros(0, np.int64) if batch.history is None else batch.history.numpy().reshape(-1)
        self._inputs.set(
            batch.rows.astype(np.int64), q_start, batch.seq_start.astype(np.int64), batch.token_ids.numpy(),
            batch.positions.numpy(), slots, pages.reshape(-1), history,
        )  # fmt: skip


class RecordedVerify:
    """Forward of steps in which every row has one block at most; context of the draft model is written in passing."""

    def __init__(self, forward: Forward, each: int, device: torch.device, vocab: int, record: Record) -> None:
        """`forward` also writes the draft model's context of all tokens; `each`: most tokens per row."""
        self._forward = forward
        self._each = each
        self._device = device
        self._vocab = vocab
        self._record = record
        self._made: dict[_Size, _Verify] = {}

    def fits(self, batch: ForwardBatch) -> bool:
        """Return whether a batch on the host is such a step."""
        is_plain = _has_no_floors(batch) and batch.images is None and batch.device_rows is None
        return is_plain and len(batch.token_ids) > 0 and int(np.diff(batch.q_start).max()) <= self._each

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits float32 [m, V] for `batch.sample_at`; valid until the next call."""
        pages = tier_of(max(_LEAST_PAGES, batch.page_table.shape[1]))
        size = _Size(tier_of(batch.num_rows), self._each, pages, batch.deterministic)
        made = self._made.get(size)
        if made is None:
            made = self._made[size] = _Verify(size, batch, self._forward, self._device, self._vocab)
            made.put(batch)
            made.replay = self._record(made.run)
        made.put(batch)
        made.replay()
        return made.logits[batch.sample_at.to(self._device)]


def _has_no_floors(batch: ForwardBatch) -> bool:
    """Return whether no row's windows are cut: behind the tokens known at admission none reaches back to a floor."""
    floors = batch.replay
    if floors is None:
        return True
    has_some = (floors.encoder_floor > 0) | (floors.known_tokens > 0) | (floors.write_from > 0)
    is_behind = (floors.known_tokens > 0) & (batch.seq_start >= floors.known_tokens)
    return not bool((has_some & ~is_behind).any())


class RecordedDrafts:
    """The stages of a draft model: from anchors to the rows that tokens are chosen from."""

    def __init__(
        self, stages: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device, record: Record,
    ) -> None:  # fmt: skip
        """`stages`: (engine rows, anchors, lengths), int64 [b] each -> logits [b, k, V] and rows [b, k, d], float32."""
        self._stages = stages
        self._device = device
        self._record = record
        self._made: dict[int, tuple[Inputs, Work, list[torch.Tensor]]] = {}

    def run(self, rows: I64, anchors: I64, lengths: I64) -> tuple[torch.Tensor, torch.Tensor]:
        """Return base logits float32 [b, k, V] and rows [b, k, d]; valid until the next call."""
        tier = tier_of(len(rows))
        if tier not in self._made:
            self._made[tier] = self._recorded(tier)
        inputs, replay, out = self._made[tier]
        # Padding repeats the last row; it writes nowhere but into scratch records.
        fill = np.minimum(np.arange(tier), len(rows) - 1)
        inputs.set(rows[fill], anchors[fill], lengths[fill])
        replay()
        return out[0][: len(rows)], out[1][: len(rows)]

    def _recorded(self, tier: int) -> tuple[Inputs, Work, list[torch.Tensor]]:
        inputs = Inputs((tier,) * 3, self._device)
        out = [torch.zeros_like(part) for part in self._stages(*inputs.parts)]

        def work() -> None:
            for kept, made in zip(out, self._stages(*inputs.parts), strict=True):
                kept.copy_(made)

        return inputs, self._record(work), out
