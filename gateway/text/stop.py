"""Stop strings in a stream of text: find the first that completes, hold back what might still become one.

The result does not depend on how the text is cut into pushes: the match that completes first wins, and of several
that complete at the same character the longest. Knows no tokens.
"""

from collections.abc import Sequence


class StopScanner:
    """Scans one sample's text. After a match nothing more may be pushed."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty strings; without any the scanner passes text through."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._starts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Return the text that can no longer belong to a stop string; on a match, all text before it."""
        if not self._held and self._starts.isdisjoint(text):
            # Nothing begins here (or there are no stop strings at all): the case of almost every token.
            return text
        buffer = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        if best is not None:
            self.matched, self._held = best[2], ""
            return buffer[: best[1]]
        keep = self._holdback(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return the text held back: the output ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _holdback(self, buffer: str) -> int:
        """Length of the longest suffix that begins some stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._starts:
                suffix = buffer[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return len(suffix)
        return 0
