"""What one attempt's worker sent, waiting for its consumer: tokens merged into runs, records in between, in order.

Bounded by tokens: a consumer that stays behind by more is cut off, and the engine never waits. Event loop's thread
only. Knows no positions' meaning; duplicates and gaps are the consumer's business.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.stream import Finished, NeedPrefill, Started


@dataclass(slots=True)
class Run:
    """Consecutive output tokens; `logprobs` is as long as `tokens`, or empty if none were asked for."""

    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failure:
    """The attempt is over without a finish. `by_worker`: the worker said so itself, so it is alive."""

    error: TandemError
    by_worker: bool


Item = Run | Started | Finished | NeedPrefill | Failure
Tap = Callable[[int, list[int], Sequence[TokenLogprobs]], bool]
"""Takes a run (position, tokens, log-probabilities) at once, or returns False: then it is kept."""


class Mailbox:
    """One producer (the link), one consumer (the request's task)."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._items: list[Item] = []
        self._tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self.tap: Tap | None = None
        """Asked for runs while the consumer waits for one and nothing else is there: it need not wake up for them."""

    def deliver(self, position: int, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> bool:
        """Add tokens, whose list now belongs to the mailbox; False if the consumer is too far behind (not kept)."""
        items, waiter = self._items, self._waiter
        if (
            self.tap is not None
            and not items
            and waiter is not None
            and not waiter.done()
            and self.tap(position, tokens, logprobs)
        ):
            return True
        if self._tokens + len(tokens) > self._max_tokens:
            return False
        self._tokens += len(tokens)
        if not (items and _extend(items[-1], position, tokens, logprobs)):
            items.append(Run(position, tokens, list(logprobs) if logprobs else []))
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return True

    def note(self, item: Item) -> None:
        """Add a record behind the tokens so far."""
        self._items.append(item)
        self._wake()

    async def take(self) -> list[Item]:
        """Wait for something and take everything. One waiter at a time; cancel-safe."""
        while not self._items:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        items, self._items, self._tokens = self._items, [], 0
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _extend(last: Item, position: int, tokens: list[int], logprobs: Sequence[TokenLogprobs]) -> bool:
    """Append to the last item if it is a run that these tokens continue."""
    if (
        not isinstance(last, Run)
        or last.position + len(last.tokens) != position
        or (len(last.logprobs) == len(last.tokens)) != (len(logprobs) == len(tokens))
    ):
        return False
    last.tokens.extend(tokens)
    last.logprobs.extend(logprobs)
    return True
