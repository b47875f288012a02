"""Numbers of KV transfer by name, for whoever exports them. Knows no metrics library."""

from collections.abc import Iterable


class Counters:
    """Monotonic counters over a closed set of names. One thread."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = dict.fromkeys(names, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count; the name must be one of those given at construction."""
        self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return a copy."""
        return dict(self._values)
