"""Holds the first turn of a new agent session until its context fits the fleet's caches.

Around admission, so that who waits here holds no permit. What fits is `gateway.routing.working_set`'s decision.
"""

import asyncio

from prometheus_client import Gauge

from core.clock import Clock
from core.errors import NoCapacity
from gateway.generation import Prompt
from gateway.placer import Placer
from gateway.router import session_of

POLL_S = 0.25
RETRY_AFTER_S = 5.0


async def begin_turn(placer: Placer, prompt: Prompt, clock: Clock) -> None:
    """Wait until the turn may start, and count it as under way: `end_turn` follows.

    Raises `NoCapacity` at the request's deadline.
    """
    session = session_of(prompt)
    size, deadline = len(prompt.token_ids), clock.now() + prompt.timeout_s
    while not placer.begin(prompt.model, session, size):
        if clock.now() + POLL_S >= deadline:
            raise NoCapacity(
                "the contexts of the sessions under way fill the caches, and none ended before the deadline",
                retry_after_s=RETRY_AFTER_S,
            )
        await asyncio.sleep(POLL_S)


def end_turn(placer: Placer, prompt: Prompt, gauge: Gauge) -> None:
    """The turn is over, however it ended."""
    placer.end(prompt.model, session_of(prompt), len(prompt.token_ids))
    for state, count in zip(("live", "waiting"), placer.sessions, strict=True):
        gauge.labels(state).set(count)
