"""Steps before the first request: what a device compiles, allocates or records for a kind of step, it does now.

Kernels are chosen by numbers of tokens and rows, and compiled anew where a number is 1 or stops being divisible by 16. So
prompts halve from the largest chunk down, each with its two neighbours, alone and beside a row that decodes; then come
long texts, and with a drafter rows that verify, in every recorded number. All of it lies in the sink page and in records
of rows, which their first owner sets up anew. Knows no model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.request import SamplingParams
from engine.config import EngineConfig, TokenFacts
from engine.plan import Plan, PlanExtra, RowInit
from engine.runner.decode_graphs import MIB, tiers_of
from engine.runner.executor import Executor

logger = logging.getLogger(__name__)

_SAMPLINGS = (
    SamplingParams(temperature=1.0, top_p=0.5, num_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.0),
)
"""Every way to choose a token; steps take turns."""
_BESIDE = 1024
"""Most tokens of a prompt beside a row that decodes: more change nothing."""
_TAILS = (256, 255, 1)
"""Tokens of the last chunk of a long text."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one row of a step computes: `tokens` behind `start` ones in KV; `is_new`: the row is set up before."""

    tokens: int
    """Of a row that decodes: at most."""
    start: int = 0
    decodes: bool = False
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The steps of one engine. `room`: tokens that a row's pages hold; `drafts`: of a decode row besides its token."""

    config: EngineConfig
    facts: TokenFacts
    room: int
    drafts: int = 0

    def run(self, executor: Executor, used_bytes: Callable[[], tuple[int, int]]) -> None:
        """Run them one by one and log what they took; `used_bytes`: device memory in use, and all there is."""
        begun, plans = time.perf_counter(), list(self.plans())
        for number, plan in enumerate(plans, start=1):
            executor.run(plan)
            if number in (1, len(plans)):
                what = f"first chunk of {len(plan.tokens)} tokens" if number == 1 else f"{number} steps in advance"
                memory = [count / MIB for count in used_bytes()]
                took = time.perf_counter() - begun
                logger.info("%s in %.1f s, device memory %.0f of %.0f MiB in use", what, took, *memory)

    def plans(self) -> Iterator[Plan]:
        """Return them, the largest chunk first: too little memory shows at once."""
        for number, parts in enumerate(self._steps()):
            yield self._plan(parts, _SAMPLINGS[number % len(_SAMPLINGS)])

    def _steps(self) -> Iterator[Sequence[_Part]]:
        most = min(self.config.chunk_tokens, self.room)
        lengths = _lengths(most)
        decoding = _Part(1 + self.drafts, start=1, decodes=True)
        # Pages have room for a row that verifies twice.
        decodes = self.room > 2 * decoding.tokens
        yield from ([_Part(tokens)] for tokens in lengths)
        if decodes and min(most, self.config.num_rows) > 1:
            yield from ([decoding, _Part(tokens)] for tokens in lengths if tokens <= min(_BESIDE, most - 1))
            yield [_Part(most // 2)] * 2
        # Where a text is longer than what is attended to, entries are searched.
        for end in _halves(self.room):
            yield from ([_Part(tokens, end - tokens)] for tokens in _TAILS if tokens <= most < end)
        if decodes:
            yield [replace(decoding, start=self.room - 2 * decoding.tokens)]
        # Of a model without a drafter these are recorded already.
        for tier in reversed(tiers_of(self.config)) if self.drafts and decodes else ():
            yield [decoding] * tier
            yield [replace(decoding, is_new=False)] * tier

    def _plan(self, parts: Sequence[_Part], sampling: SamplingParams) -> Plan:
        lengths = np.array([part.tokens for part in parts], np.int32)
        inits = tuple(self._init(row, part, sampling) for row, part in enumerate(parts) if part.is_new)
        return Plan(
            step=0,
            rows=np.arange(len(parts), dtype=np.int32),
            gens=np.zeros(len(parts), np.uint32),
            q_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            seq_start=np.array([part.start for part in parts], np.int32),
            use_next=np.array([part.decodes for part in parts], np.uint8),
            sample=np.ones(len(parts), np.uint8),
            tokens=np.zeros(int(lengths.sum()), np.int32),
            table_deltas=np.zeros((0, 3), np.int32),
            extra=PlanExtra(inits=inits),
        )

    def _init(self, row: int, part: _Part, sampling: SamplingParams) -> RowInit:
        rule = self.facts.reuse
        return RowInit(
            row=row,
            generation=0,
            sampling=sampling,
            # All of KV, and the token whose KV a row that decodes computes first.
            token_ids=bytes(4 * (part.start + 1)),
            num_prompt_tokens=part.start + 1,
            min_tokens=0,
            masked_until_min=(),
            next_token=0 if part.decodes else -1,
            kv_limit=self.room,
            known_tokens=0 if part.decodes else rule.known_tokens(rule.decoder_floor(part.start + part.tokens)),
        )


def _halves(most: int) -> Iterator[int]:
    while most:
        yield most
        most //= 2


def _lengths(most: int) -> list[int]:
    """Return numbers of tokens from the most down by halves, each with its neighbours, without repeats."""
    sizes = [most, *_halves(1 << (most - 1).bit_length())]
    return sorted({n for size in sizes for n in (size - 1, size, size + 1) if 0 < n <= most}, reverse=True)
