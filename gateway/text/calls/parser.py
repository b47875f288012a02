"""How calls of tools are found in an answer's text: what comes before them, and what is none after all.

Text before the first call is the answer's. What models write between and after calls is no part of it and is dropped.
The sum of what comes out does not depend on how the text is cut.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.text.piece import CallDelta


class CallSink:
    """Collects what became clear of calls since the last `take`. Ids are given later."""

    def __init__(self) -> None:
        self.count = 0
        """Calls begun so far."""
        self._deltas: list[CallDelta] = []

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self._deltas.append(CallDelta(self.count, name=name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call that was begun last."""
        index = self.count - 1
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas[-1]
            self._deltas[-1] = CallDelta(index, last.arguments + arguments, name=last.name)
        else:
            self._deltas.append(CallDelta(index, arguments))

    def take(self) -> list[CallDelta]:
        """Return the deltas, at most one for each call."""
        deltas, self._deltas = self._deltas, []
        return deltas


class CallBody(Protocol):
    """One syntax of calls, behind its mark."""

    @property
    def is_broken(self) -> bool:
        """What came so far cannot be a call."""
        ...

    def feed(self, char: str, sink: CallSink) -> None:
        """Take the next character."""
        ...


class CallParser:
    """Parses one answer: text until a mark, calls behind it. Without a call behind the mark all of it was text."""

    def __init__(self, body: CallBody, marks: Sequence[str], bare: str = "") -> None:
        """`bare`: a character that begins calls without a mark, where it is the answer's first."""
        self._body = body
        self._marks = tuple(marks)
        self._bare = bare
        self._sink = CallSink()
        self._held = ""
        """Text that may be the beginning of a mark; behind the mark, all of it as long as no call came."""
        self._is_first = bool(bare)
        self._in_body = False

    @property
    def has_calls(self) -> bool:
        """Whether a call was found."""
        return self._sink.count > 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Return the text and what became clear of calls; text comes before calls."""
        out = ""
        while text:
            if self._in_body:
                text = self._push_body(text)
                if text or not self._in_body:
                    out += self._take_held()
            else:
                passed, text = self._push_text(text)
                out += passed
        return out, self._sink.take()

    def finish(self) -> str:
        """Return the text held back; nothing may be pushed afterwards."""
        return self._take_held()

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _push_text(self, text: str) -> tuple[str, str]:
        """Return (text that is certain, what is behind a mark)."""
        buffer = self._take_held() + text
        if self._is_first and (begun := buffer.lstrip()):
            self._is_first = False
            if begun[0] == self._bare:
                self._in_body = True
                return "", buffer
        found = [(at, -len(mark)) for mark in self._marks if (at := buffer.find(mark)) >= 0]
        if found:
            at, length = min(found)
            passed = buffer[:at].rstrip()
            self._held = buffer[len(passed) : at - length]
            self._in_body = True
            return passed, buffer[at - length :]
        keep = _held_length(buffer, self._marks)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], ""

    def _push_body(self, text: str) -> str:
        """Feed the body; return the rest if it turns out to be none."""
        for at, char in enumerate(text, start=1):
            self._body.feed(char, self._sink)
            if self._sink.count:
                self._held = ""
                continue
            self._held += char
            if self._body.is_broken:
                # Not looked for again: what reads like a call in the middle of a text is text.
                self._in_body, self._marks, self._is_first = False, (), False
                return text[at:]
        return ""


def _held_length(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end may belong to a mark, or are space before one."""
    if not marks:
        return 0
    for start in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return len(text) - len(text[:start].rstrip())
    return len(text) - len(text.rstrip())
