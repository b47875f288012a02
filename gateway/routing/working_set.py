"""Admits new agent sessions only while the contexts of all live ones fit the fleet's caches.

A session's context is reused turn after turn; when all of them together exceed the caches, least-recently-used
eviction throws each out before its next turn, and no placement helps. So a new session waits, first come first
served, while running ones go on. A session is live from its first turn until it has been silent for the time that
95 of 100 pauses stay below; one that comes back later enters at once. Pure state; `now` is passed in. Only
sessions that name themselves are known.
"""

from collections import OrderedDict
from dataclasses import dataclass

PAUSE_QUANTILE = 0.95
PAUSE_STEP = 0.05
"""Relative step of the running quantile."""
FIRST_PAUSE_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 2.0, 600.0
REMEMBERED = 10_000
"""Sessions that left and may come back."""
LEARNING = 0.02
PATIENCE_S = 2.0
"""Who has not asked again for so long does not wait any more."""


@dataclass(slots=True)
class _Session:
    tokens: int
    open: int = 0
    """Turns under way."""
    turns: int = 1
    silent_since: float = 0.0
    home: int = -1
    """Slot of the worker that has its context."""


class WorkingSet:
    """Live sessions of one model, and those that wait to become live."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._live: OrderedDict[int, _Session] = OrderedDict()
        self._waiting: OrderedDict[int, float] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()
        self._typical = 0.0
        self._returning = 1.0
        """Share of sessions that have a second turn: some clients name every request a session."""
        self.pause_s = FIRST_PAUSE_S
        """95 % of pauses between turns are shorter."""

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
            known.turns += 1
            known.tokens = tokens
            self._returning += LEARNING * (1.0 - self._returning) * (known.turns == 2)
            return True
        self._sweep(now)
        if session not in self._left and not self._may_enter(session, tokens, capacity, now):
            self._waiting[session] = now
            return False
        self._waiting.pop(session, None)
        self._left.pop(session, None)
        self._live[session] = _Session(tokens, open=1)
        return True

    def end(self, session: int, tokens: int, now: float) -> None:
        """A turn ended with a context of `tokens`, however it ended."""
        known = self._live.get(session)
        if known is None or not known.open:
            return
        known.open -= 1
        known.silent_since = now
        known.tokens = tokens
        self._live.move_to_end(session)
        self._typical += (LEARNING if self._typical else 1.0) * (tokens - self._typical)

    def settle(self, session: int, slot: int) -> None:
        """Its context is at this worker from now on."""
        if session in self._live:
            self._live[session].home = slot

    def homes(self, but: int) -> dict[int, float]:
        """Return by slot the tokens that the sessions there need, without one session's."""
        held: dict[int, float] = {}
        for session, known in self._live.items():
            if session != but:
                held[known.home] = held.get(known.home, 0.0) + self._needs(known)
        return held

    def _needs(self, known: _Session) -> float:
        """Return the tokens of its context, or what it will usually grow to; 0 if it will hardly come back."""
        if known.turns == 1 and not known.open and self._returning < 0.5:
            return 0.0
        return max(float(known.tokens), self._typical)

    def _may_enter(self, session: int, tokens: int, capacity: float, now: float) -> bool:
        while self._waiting:
            first, asked = next(iter(self._waiting.items()))
            if first == session:
                break
            if now - asked < PATIENCE_S:
                return False
            del self._waiting[first]
        held = sum(map(self._needs, self._live.values()))
        return not self._live or held + (self._typical or tokens) <= self._share * capacity

    def _learn_pause(self, pause: float) -> None:
        """Move the running quantile a step towards where 95 % of pauses are shorter."""
        step = PAUSE_STEP * (PAUSE_QUANTILE if pause > self.pause_s else PAUSE_QUANTILE - 1.0)
        self.pause_s = min(max(self.pause_s * (1 + step), SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def _sweep(self, now: float) -> None:
        """Let go of the silent ones; those that ended a turn longest ago come first."""
        for session, known in list(self._live.items()):
            if not known.open and now - known.silent_since >= self.pause_s:
                del self._live[session]
                self._returning -= LEARNING * self._returning * (known.turns == 1)
                self._left[session] = None
                if len(self._left) > REMEMBERED:
                    self._left.popitem(last=False)
