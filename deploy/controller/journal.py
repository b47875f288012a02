"""Every decision as one JSON line with all its inputs, so that it can be decided again from the log."""

from pathlib import Path

import msgspec

from deploy.autoscale.decide import Decision, Memory, decide
from deploy.autoscale.signals import Rules, Signals

MAX_BYTES = 64 << 20
"""A journal past this is set aside once; two files are kept."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tick. `memory` is what the decision started from."""

    fence: int
    advisory: bool
    rules: Rules
    memory: Memory
    signals: Signals
    decision: Decision


class Journal:
    """Appends entries to a file; None writes nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, entry: Entry) -> None:
        """Append one line."""
        if self._path is None:
            return
        if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")


def replay(path: Path) -> list[tuple[Decision, Decision]]:
    """Decide every entry of a journal again: pairs of (written, decided now)."""
    entries = [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
    return [(entry.decision, decide(entry.rules, entry.memory, entry.signals)[0]) for entry in entries]
