"""Compiles grammars on threads of its own and keeps what it compiled: an engine's grammars by their text.

Neither the event loop nor the scheduler waits for a compilation: a worker awaits `ready` before it queues a request, and
the executor then finds the grammar compiled. Bounded: by the library's own budgets, in time, in number and in size.
Safe from any thread. Knows no rows and no requests.
"""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from core.errors import BadRequest, NoCapacity
from engine.config import GrammarConfig
from engine.grammar.constraint import Constraint
from engine.grammar.vocabulary import GrammarVocabulary, build_vocabulary

_FIELD = "response_format"
Definition = Callable[[], dict[str, Any] | None]
"""Reads what a tokenizer.json holds; None: there is none."""


@dataclass(slots=True)
class GrammarMeter:
    """Running figures; seconds are wall time."""

    grammar_requests: int = 0
    grammar_compiled: int = 0
    grammar_refused: int = 0
    """Grammars that could not be compiled."""
    grammar_compile_s: float = 0.0
    grammar_masks: int = 0
    grammar_mask_wait_s: float = 0.0
    """That the executor waited for masks which the forward pass had not covered."""
    grammar_failed: int = 0
    """Requests that ended because their grammar became too complex on the way."""


class GrammarCompiler:
    """The grammars of one engine."""

    def __init__(
        self,
        definition: Definition,
        config: GrammarConfig,
        *,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        wall_time: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`definition` is called at once, on a thread; `stop_ids` end a text."""
        self.config = config
        self.meter = GrammarMeter()
        self.vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._definition = definition
        self._wall_time = wall_time
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="tandem-grammar")
        self._lock = threading.Lock()
        self._vocabulary = self._threads.submit(self._load)
        self._kept: OrderedDict[bytes, tuple[int, Future[LLMatcher]]] = OrderedDict()
        """By digest: characters of the text, and what it was compiled to."""
        self._num_chars = 0
        self._waiting = 0

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ready(self, grammar: str) -> None:
        """Return when `open` will not block; raises `BadRequest` or `NoCapacity`."""
        if not grammar:
            return
        self.meter.grammar_requests += 1
        if not self._vocabulary.done():
            # Only right after the start, and not this grammar's fault. If it fails, so does every grammar.
            with contextlib.suppress(BadRequest):
                await asyncio.wrap_future(self._vocabulary)
        compiled = asyncio.wrap_future(self._find(grammar))
        done, _ = await asyncio.wait((compiled,), timeout=self.config.compile_timeout_s)
        if not done:
            compiled.add_done_callback(_take_note)
            limit_s = self.config.compile_timeout_s
            raise BadRequest(f"the grammar takes longer than {limit_s:g} s to compile; simplify it", param=_FIELD)
        compiled.result()

    def open(self, grammar: str) -> Constraint:
        """Return the constraint of a new sample; compiles here and now what is no longer kept. Raises as `ready`."""
        matcher = self._find(grammar).result().deep_copy()
        return Constraint(matcher, self._vocabulary.result())

    def statistics(self) -> dict[str, int | float]:
        """Return counters and gauges by name."""
        return {**asdict(self.meter), "grammar_kept": len(self._kept), "grammar_waiting": self._waiting}

    def _find(self, text: str) -> Future[LLMatcher]:
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found[1]
            if self._waiting >= self.config.max_waiting:
                raise NoCapacity("too many grammars wait to be compiled; try again soon", retry_after_s=1.0)
            self._waiting += 1
            compiled = self._threads.submit(self._compile, text)
            self._kept[key] = len(text), compiled
            self._num_chars += len(text)
            while len(self._kept) > 1 and self._is_full():
                self._num_chars -= self._kept.popitem(last=False)[1][0]
        # Outside the lock: it may run at once, on this thread.
        compiled.add_done_callback(self._leave_line)
        return compiled

    def _is_full(self) -> bool:
        return len(self._kept) > self.config.cached or self._num_chars > self.config.cached_chars

    def _leave_line(self, _compiled: Future[LLMatcher]) -> None:
        with self._lock:
            self._waiting -= 1

    def _load(self) -> GrammarVocabulary:
        definition = self._definition()
        if definition is None:
            raise BadRequest("this model has no tokenizer.json, so its answers cannot follow a grammar", param=_FIELD)
        try:
            return build_vocabulary(definition, self.vocab_size, self._stop_ids)
        except ValueError as error:
            raise BadRequest(f"this model's tokenizer cannot be used with grammars: {error}", param=_FIELD) from error

    def _compile(self, text: str) -> LLMatcher:
        # Loading was queued before, so some thread is at it: this wait ends.
        tokenizer = self._vocabulary.result().tokenizer
        started = self._wall_time()
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits())
        seconds, is_wrong = self._wall_time() - started, matcher.is_error()
        with self._lock:
            self.meter.grammar_compile_s += seconds
            self.meter.grammar_compiled += not is_wrong
            self.meter.grammar_refused += is_wrong
        if is_wrong:
            raise BadRequest(f"the grammar is refused: {matcher.get_error()}", param=_FIELD)
        return matcher


def _take_note(compiled: "asyncio.Future[LLMatcher]") -> None:
    """Look at the end of a compilation that nobody waits for any more, so that none is reported as unheard."""
    if not compiled.cancelled():
        compiled.exception()


def limits() -> LLParserLimits:
    """Return the budgets of compiling a grammar and of one mask: work, not time, so that they do not depend on load."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
