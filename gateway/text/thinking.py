"""Tells reasoning from the answer by the marks that models write around it. Knows no tokens.

Space around the reasoning and before the answer belongs to neither. The result does not depend on the cut of pushes.
"""

import enum
from dataclasses import dataclass

THINK, THINK_END = "<think>", "</think>"


class Stage(enum.Enum):
    """Where a text stands."""

    BEFORE = enum.auto()
    """Nothing but space, or part of the opening mark: it may become either."""
    REASONING = enum.auto()
    ANSWER = enum.auto()


@dataclass(slots=True)
class ThinkingMarks:
    """The marks of one kind of models."""

    begin: str = THINK
    end: str = THINK_END


class ThinkingSplitter:
    """Splits one answer."""

    def __init__(self, marks: ThinkingMarks, stage: Stage) -> None:
        """`stage` is where the prompt left off: REASONING if it ends with the opening mark."""
        self._marks = marks
        self.stage = stage
        self._held = ""
        self._skips_space = stage is Stage.REASONING

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, answer) that are certain."""
        if self.stage is Stage.ANSWER and not self._skips_space:
            return "", text
        buffer, self._held = self._held + text, ""
        if self.stage is Stage.BEFORE:
            begun = buffer.lstrip()
            if not begun or (len(begun) < len(self._marks.begin) and self._marks.begin.startswith(begun)):
                self._held = buffer
                return "", ""
            if not begun.startswith(self._marks.begin):
                self.stage = Stage.ANSWER
                return "", buffer
            self.stage, self._skips_space = Stage.REASONING, True
            buffer = begun[len(self._marks.begin) :]
        reasoning = ""
        if self.stage is Stage.REASONING:
            reasoning, buffer = self._push_reasoning(buffer)
        return reasoning, self._skipped(buffer) if self.stage is Stage.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """Return what was held back as (reasoning, answer)."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.stage is Stage.REASONING else ("", held)

    def _push_reasoning(self, text: str) -> tuple[str, str]:
        text = self._skipped(text)
        end = self._marks.end
        at = text.find(end)
        if at >= 0:
            self.stage, self._skips_space = Stage.ANSWER, True
            return text[:at].rstrip(), text[at + len(end) :]
        cut = len(text)
        for start in range(max(0, cut - len(end) + 1), cut):
            if end.startswith(text[start:]):
                cut = start
                break
        cut = len(text[:cut].rstrip())
        self._held = text[cut:]
        return text[:cut], ""

    def _skipped(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text
