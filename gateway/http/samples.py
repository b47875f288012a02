"""Runs the samples of one client request on the cluster and hands their pieces on, closing what is no longer wanted.

Knows the `Generator` and the text of a sample; knows no HTTP and no answer format.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from core.errors import InvariantError
from gateway.generation import Delta, Generator, Prompt
from gateway.text.chat import AnswerText
from gateway.text.piece import Piece


class Sample(msgspec.Struct, frozen=True, eq=False):
    """One choice to generate: what to ask the cluster, and how its tokens become text."""

    index: int
    """Of the choice in the client's answer."""
    prompt_index: int
    prompt: Prompt
    text: AnswerText


class Progress(msgspec.Struct, frozen=True, gc=False):
    """One step of one sample. `cached_tokens` is set once per sample."""

    sample: Sample
    piece: Piece
    cached_tokens: int | None = None


Sink = Callable[[Sequence[Progress]], Awaitable[None]]
"""Takes everything that is ready at one moment. While it waits, no more is taken from the samples than a bound."""


Now = Callable[[Sample, Piece], bool]
"""Takes a piece at once, or returns False: then it goes to the sink. Not asked for pieces that begin or end something."""


def _never(_sample: Sample, _piece: Piece) -> bool:
    return False


def run_samples(
    generator: Generator, samples: Sequence[Sample], sink: Sink, now: Now = _never
) -> Coroutine[Any, Any, None]:
    """Generate all samples side by side until each has finished; on any error or cancellation all are closed.

    `now` is asked where there is one sample only: of several, pieces wait for one another.
    """
    # Returned rather than awaited here: each frame between the event loop and a stream is walked for every token.
    if len(samples) == 1:
        return _run_one(generator, samples[0], sink, now)
    return _run_many(generator, samples, sink)


async def _run_many(generator: Generator, samples: Sequence[Sample], sink: Sink) -> None:
    queue: asyncio.Queue[Progress | Exception] = asyncio.Queue(maxsize=2 * len(samples))
    tasks = [asyncio.create_task(_pump(generator, sample, queue)) for sample in samples]
    try:
        running = len(samples)
        while running:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            steps: list[Progress] = []
            for item in batch:
                if isinstance(item, Exception):
                    raise item
                steps.append(item)
                running -= item.piece.finish is not None
            await sink(steps)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(generator: Generator, sample: Sample, sink: Sink, now: Now = _never) -> None:
    tap = _Tap(sample, now) if now is not _never and sample.prompt.timeline is None else None
    stream = generator.generate(sample.prompt, tap)
    push = sample.text.push
    try:
        async for delta in stream:
            if tap is not None and tap.is_waiting:
                if await _hand_on(Progress(sample, tap.take()), stream, sink):
                    return
                if not delta.token_ids and delta.finish is None:
                    continue
            piece = push(delta)
            if piece.finish is None and delta.num_cached_tokens is None and now(sample, piece):
                continue
            if await _hand_on(Progress(sample, piece, delta.num_cached_tokens), stream, sink):
                return
        raise InvariantError("the generator ended without a finish reason")
    finally:
        await _close(stream)


async def _hand_on(step: Progress, stream: AsyncIterator[Delta], sink: Sink) -> bool:
    """Give a step to the sink; True if it was the last."""
    is_last = step.piece.finish is not None
    if is_last:
        # Closed before the client is served: after a stop string the workers should not wait for its network.
        await _close(stream)
    await sink((step,))
    return is_last


class _Tap:
    """Turns deltas into pieces the moment they come; what cannot go out at once waits for the sample's own task.

    Called from whoever reads the worker's stream: its errors must not reach it.
    """

    __slots__ = ("_error", "_left", "_now", "_push", "_sample", "is_waiting")

    def __init__(self, sample: Sample, now: Now) -> None:
        self._sample = sample
        self._push = sample.text.push
        self._now = now
        self._left: Piece | None = None
        self._error: Exception | None = None
        self.is_waiting = False
        """There is something to `take`."""

    def __call__(self, delta: Delta) -> bool:
        try:
            piece = self._push(delta)
            if piece.finish is None and self._now(self._sample, piece):
                return True
            self._left = piece
        except Exception as error:  # noqa: BLE001  (the request's own task raises it again)
            self._error = error
        self.is_waiting = True
        return False

    def take(self) -> Piece:
        """Return the piece that could not go out, or raise what stood in its way."""
        self.is_waiting = False
        if self._error is not None:
            raise self._error
        piece, self._left = self._left, None
        assert piece is not None
        return piece


async def _pump(generator: Generator, sample: Sample, queue: asyncio.Queue[Progress | Exception]) -> None:
    async def put(steps: Sequence[Progress]) -> None:
        for step in steps:
            await queue.put(step)

    try:
        await _run_one(generator, sample, put)
    except Exception as error:  # noqa: BLE001  (the top of a task; the request's own task raises it again)
        await queue.put(error)


async def _close(stream: AsyncIterator[Delta]) -> None:
    """Tell the generator that no more is wanted; without effect after the last delta."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
