"""Checks grammars before anything is sent to the workers, on threads of its own, and remembers what it found.

A wrong grammar is the client's: 400, with the library's reason and, in a JSON schema, the path of the smallest part that
is wrong by itself. Used by one event loop.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from core.errors import BadRequest, NoCapacity
from core.request import MAX_GRAMMAR_CHARS
from gateway.text.grammar import AnswerGrammar, Shape, schema_entry, walk_schema
from gateway.text.verdict import verdict_on

_REMEMBERED = 4096
_MAX_WAITING = 64
_MAX_PARTS = 200
"""Parts of a wrong schema that are tried for the smallest one."""

Fault = tuple[str, str]
"""(path of what is wrong, why)."""


class GrammarChecker:
    """Answers from memory where it can."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # No request waits for a verdict, so none may wait behind one.
        self._judges = ThreadPoolExecutor(1, thread_name_prefix="verdict")
        self._known: OrderedDict[bytes, Fault | None] = OrderedDict()
        self._waiting = 0
        self._judging = 0

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        for threads in (self._threads, self._judges):
            threads.shutdown(wait=False, cancel_futures=True)

    def judge(self, shape: Shape, text: str, tell: Callable[[str], None]) -> None:
        """Tell whether a finished answer has its form, some time later; `unchecked` if too many wait."""
        if self._judging >= _MAX_WAITING:
            tell("unchecked")
            return
        self._judging += 1

        def done(work: asyncio.Future[str]) -> None:
            self._judging -= 1
            tell("unchecked" if work.cancelled() or work.exception() else work.result())

        asyncio.get_running_loop().run_in_executor(self._judges, verdict_on, shape, text).add_done_callback(done)

    async def check(self, grammar: AnswerGrammar | None) -> None:
        """Raise `BadRequest` if no worker could follow `grammar`."""
        if grammar is None:
            return
        key = hashlib.sha256(grammar.text.encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._known[key] = await self._find_fault(grammar)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        if fault := self._known[key]:
            path, reason = fault
            raise BadRequest(f"`{path}`: {reason}", param=path)

    async def _find_fault(self, grammar: AnswerGrammar) -> Fault | None:
        if self._waiting >= _MAX_WAITING:
            raise NoCapacity("too many grammars wait to be checked; try again soon", retry_after_s=1.0)
        self._waiting += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, find_fault, grammar)
            done, _ = await asyncio.wait((work,), timeout=self._timeout_s)
        finally:
            self._waiting -= 1
        if not done:
            work.add_done_callback(lambda work: work.cancelled() or work.exception())
            return grammar.sources[0].param, f"it takes longer than {self._timeout_s:g} s to check; simplify it"
        return work.result()


def find_fault(grammar: AnswerGrammar) -> Fault | None:
    """Return what is wrong with a grammar, None if nothing is."""
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        return grammar.sources[0].param, f"its grammar has more than {MAX_GRAMMAR_CHARS} characters; simplify it"
    reason = _refusal(grammar.text)
    if not reason:
        return None
    for source in grammar.sources:
        if source.schema is not None and (alone := _refusal_of(source.schema)):
            return _smallest(source.schema, source.param, alone)
    return grammar.sources[0].param, reason


def _smallest(schema: Mapping[str, Any], where: str, reason: str) -> Fault:
    """Return the innermost part of a wrong schema that is wrong by itself."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = where, reason
    for tried, (path, part) in enumerate(walk_schema(schema, where)):
        if tried >= _MAX_PARTS:
            break
        # Parts of what is right need no look.
        if path.startswith(found[0]) and (inner := _refusal_of({**shared, **part})):
            found = path, inner
    return found


def _refusal_of(schema: Mapping[str, Any]) -> str:
    return _refusal(json.dumps({"grammars": [schema_entry(schema)]}))


def _refusal(grammar: str) -> str:
    """Return the library's reason for not taking a grammar, on one line; empty if it does."""
    limits = LLParserLimits(verbose_errors=False)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return " ".join(messages[0].split())[:500] if is_wrong else ""
