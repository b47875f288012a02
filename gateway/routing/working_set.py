"""Admits new agent sessions only while the contexts of all live ones fit the fleet's caches.

A session's context is reused turn after turn; when all of them together exceed the caches, least-recently-used
eviction throws each out before its next turn, and no placement helps. So a new session waits, first come first
served, while running ones go on. A session is live from its first turn until it has been silent for the time that
95 of 100 pauses stay below. Pure state; `now` is passed in. Only sessions that name themselves are known.
"""

from collections import OrderedDict
from dataclasses import dataclass

PAUSE_QUANTILE = 0.95
PAUSE_STEP = 0.05
"""Relative step of the running quantile."""
FIRST_PAUSE_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 5.0, 600.0
LEARNING = 0.02
PATIENCE_S = 2.0
"""Who has not asked again for so long does not wait any more."""


@dataclass(slots=True)
class _Session:
    tokens: int
    open: int = 0
    """Turns under way."""
    silent_since: float = 0.0


class WorkingSet:
    """Live sessions of one model, and those that wait to become live."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._live: OrderedDict[int, _Session] = OrderedDict()
        self._waiting: OrderedDict[int, float] = OrderedDict()
        self._tokens = 0
        self._typical = 0.0
        self.pause_s = FIRST_PAUSE_S
        """A session silent for longer has left."""

    @property
    def live(self) -> int:
        """Sessions whose contexts are counted."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Sessions that wait for room."""
        return len(self._waiting)

    def begin(self, session: int, tokens: int, capacity: float, now: float) -> bool:
        """A turn of `tokens` prompt tokens wants to start; False: ask again, there is no room in `capacity` tokens.

        True counts it as under way: `end` follows.
        """
        known = self._live.get(session)
        if known is not None:
            if not known.open:
                self._learn_pause(now - known.silent_since)
            known.open += 1
            self._resize(known, tokens)
            return True
        self._sweep(now)
        if not self._may_enter(session, tokens, capacity, now):
            self._waiting[session] = now
            return False
        self._waiting.pop(session, None)
        self._live[session] = _Session(0, open=1)
        self._resize(self._live[session], tokens)
        return True

    def end(self, session: int, tokens: int, now: float) -> None:
        """A turn ended with a context of `tokens`, however it ended."""
        known = self._live.get(session)
        if known is None or not known.open:
            return
        known.open -= 1
        known.silent_since = now
        self._live.move_to_end(session)
        self._resize(known, tokens)
        self._typical += (LEARNING if self._typical else 1.0) * (tokens - self._typical)

    def leave(self, session: int) -> None:
        """The client said that no further turn comes."""
        known = self._live.pop(session, None)
        if known is not None:
            self._tokens -= known.tokens

    def _may_enter(self, session: int, tokens: int, capacity: float, now: float) -> bool:
        while self._waiting:
            first, asked = next(iter(self._waiting.items()))
            if first == session:
                break
            if now - asked < PATIENCE_S:
                return False
            del self._waiting[first]
        # It and those that began lately will grow to what a context usually is.
        expected = max(tokens, self._typical)
        young = sum(max(0.0, self._typical - one.tokens) for one in self._live.values())
        return not self._live or self._tokens + young + expected <= self._share * capacity

    def _resize(self, known: _Session, tokens: int) -> None:
        self._tokens += tokens - known.tokens
        known.tokens = tokens

    def _learn_pause(self, pause: float) -> None:
        """Move the running quantile a step towards where 95 % of pauses are shorter."""
        step = PAUSE_STEP * (PAUSE_QUANTILE if pause > self.pause_s else PAUSE_QUANTILE - 1.0)
        self.pause_s = min(max(self.pause_s * (1 + step), SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def _sweep(self, now: float) -> None:
        """Let go of the silent ones; those that ended a turn longest ago come first."""
        for session, known in list(self._live.items()):
            if known.open:
                continue
            if now - known.silent_since < self.pause_s:
                break
            self.leave(session)
