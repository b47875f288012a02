"""The grammars of an executor's rows: masks made while the forward pass computes, tokens taken in, drafts walked ahead.

Owned by the executor thread; one helper opens grammars and makes masks meanwhile, never at the same time as its owner.
A mask says the same wherever and however often it is made, so batches, retries and drafts do not show in the text.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from core.errors import TandemError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import Constraint, fill_masks
from engine.grammar.vocabulary import Words
from engine.plan import RowInit

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BARRIERS: F32 = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf)).astype(np.float32)
"""[256, 8] by a byte of a mask: 0 where a bit is set, else -inf. Adding rows of it takes as long whatever the mask."""


@dataclass(slots=True)
class _Row:
    """A row that has a grammar."""

    opening: Future[Constraint]
    base: int
    """Position of its next token."""
    masks: list[Words] = field(default_factory=list[Words])
    """Of positions base, base + 1 ...: the drafts in between are `ahead`'s."""
    ahead: Constraint | None = None
    """Stands behind the drafts that were walked; None: there is no way further."""
    walked: list[int] = field(default_factory=list[int])
    error: str = ""


class RowGrammars:
    """Of one executor."""

    def __init__(self, compiler: GrammarCompiler | None, wall_time: Callable[[], float] = time.perf_counter) -> None:
        """Without `compiler` no row may have a grammar."""
        self._compiler = compiler
        self._wall_time = wall_time
        self._rows: dict[int, _Row] = {}
        self._helper: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._making: Future[None] | None = None

    def set_row(self, init: RowInit) -> None:
        """Begin a row; whatever an earlier owner left is forgotten. Its outputs so far are taken in by the helper."""
        self._rows.pop(init.row, None)
        if not init.grammar:
            return
        assert self._compiler is not None, "workers refuse grammars that they cannot compile"
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="tandem-masks")
            self._executor = LLExecutor(self._compiler.config.threads)
        outputs = np.frombuffer(init.token_ids, np.int32)[init.num_prompt_tokens :].tolist()
        opening = self._helper.submit(_open, self._compiler, init.grammar, outputs)
        self._rows[init.row] = _Row(opening, base=len(init.token_ids) // 4)

    def begin(self, rows: I32) -> None:
        """Start to make the masks of the next tokens of `rows`, for those that have a grammar and no mask yet."""
        asking = [self._rows[row] for row in rows.tolist() if row in self._rows] if self._rows else []
        asking = [row for row in asking if not (row.masks or row.error)]
        if asking:
            assert self._helper is not None
            self._making = self._helper.submit(self._make, asking, None)

    def finish(self) -> None:
        """Wait for what `begin` started."""
        if self._making is not None:
            started = self._wall_time()
            self._making.result()
            self._making = None
            assert self._compiler is not None
            self._compiler.meter.grammar_mask_wait_s += self._wall_time() - started

    def barrier(self, row: int, position: int) -> F32 | None:
        """Return what keeps a row from saying at `position` what it may not (`engine.sampling.Barrier`)."""
        found = self._rows.get(row)
        if found is None or position - found.base >= len(found.masks):
            # Without a mask: behind a draft that does not fit, where nothing is ever accepted.
            return None
        assert self._compiler is not None
        mask = found.masks[position - found.base].view(np.uint8)
        return BARRIERS.take(mask, axis=0).reshape(-1)[: self._compiler.vocab_size]

    def take(self, rows: I32, tokens: I32, count: I32) -> None:
        """Take in the tokens that stand: `tokens` [m, w], of which row i has `count[i]`."""
        if not self._rows:
            return
        for i, row in enumerate(rows.tolist()):
            found = self._rows.get(row)
            if found is None:
                continue
            found.masks, found.ahead, found.walked = [], None, []
            found.base += int(count[i])
            if not found.error:
                constraint = found.opening.result()
                for token in tokens[i, : count[i]].tolist():
                    constraint.consume(token)
                found.error = constraint.error

    def draft_from(self, rows: I32) -> None:
        """Begin to walk ahead from where `rows` stand, and make the masks of their first drafts."""
        asking = [self._rows[row] for row in rows.tolist() if row in self._rows] if self._rows else []
        asking = [row for row in asking if not row.error]
        for row in asking:
            row.ahead = row.opening.result().fork()
        self._make(asking, [row.ahead for row in asking if row.ahead is not None])

    def draft(self, rows: I32, tokens: I64) -> None:
        """Walk one draft further, `tokens` [m], and make the masks of what follows it. One that does not fit ends the walk."""
        if not self._rows:
            return
        asking: list[_Row] = []
        ahead: list[Constraint] = []
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            found = self._rows.get(row)
            if found is None or found.ahead is None:
                continue
            found.walked.append(token)
            if found.ahead.consume(token):
                asking.append(found)
                ahead.append(found.ahead)
            else:
                found.ahead = None
        self._make(asking, ahead)

    def proposed(self, rows: I32, drafts: I64) -> None:
        """Walk what a drafter proposed, `drafts` [m, k], where it did not choose by the masks or thought better of it."""
        for i, row in enumerate(rows.tolist() if self._rows else ()):
            found = self._rows.get(row)
            if found is not None and found.walked != drafts[i, : len(found.walked)].tolist():
                found.masks, found.walked = found.masks[:1], []
                found.ahead = found.opening.result().fork()
        for column in range(drafts.shape[1] if self._rows else 0):
            left = [
                i for i, row in enumerate(rows.tolist()) if row in self._rows and len(self._rows[row].walked) <= column
            ]
            self.draft(rows[left], drafts[left, column])

    def failures(self, rows: I32) -> tuple[tuple[int, str], ...]:
        """Return (index into `rows`, reason) of those that cannot go on; each is told once."""
        if not self._rows:
            return ()
        found: list[tuple[int, str]] = []
        for i, row in enumerate(rows.tolist()):
            if row in self._rows and self._rows[row].error:
                found.append((i, self._rows.pop(row).error))
        if found:
            assert self._compiler is not None
            self._compiler.meter.grammar_failed += len(found)
        return tuple(found)

    def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            self._helper.shutdown(wait=False, cancel_futures=True)

    def _make(self, rows: Sequence[_Row], constraints: Sequence[Constraint] | None) -> None:
        """Append one mask to each row, of `constraints`, or of where the rows stand."""
        if not rows:
            return
        assert self._compiler is not None
        assert self._executor is not None
        if constraints is None:
            rows, constraints = _opened(rows)
        masks = np.zeros((len(rows), -(-self._compiler.vocab_size // 32)), np.int32)
        fill_masks(constraints, masks, self._executor)
        self._compiler.meter.grammar_masks += len(rows)
        for row, constraint, mask in zip(rows, constraints, masks, strict=True):
            if not constraint.error:
                row.masks.append(mask)
            elif constraint is row.ahead:
                # Only if this draft is accepted does it matter, and then the next step finds it again.
                row.ahead = None
            else:
                row.error = constraint.error


def _open(compiler: GrammarCompiler, grammar: str, outputs: Sequence[int]) -> Constraint:
    constraint = compiler.open(grammar)
    for token in outputs:
        constraint.consume(token)
    return constraint


def _opened(rows: Sequence[_Row]) -> tuple[list[_Row], list[Constraint]]:
    """Return the rows whose grammar could be opened, with it; the others keep the reason."""
    opened: list[_Row] = []
    constraints: list[Constraint] = []
    for row in rows:
        try:
            constraints.append(row.opening.result())
        except TandemError as error:
            row.error = error.message
        else:
            opened.append(row)
    return opened, constraints
