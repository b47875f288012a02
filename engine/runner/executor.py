"""Turns plans into tokens, one per row and step: the executor of models without a drafter, and what all executors share.

Used by one thread. Knows no threads, no sequences, no pool and no tree.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.row_grammars import RowGrammars
from engine.models.model import KVTensors, Model
from engine.plan import Plan, StepResult
from engine.runner.row_images import row_images
from engine.runner.row_mirror import RowMirror
from engine.sampling import Sampler

Scalar = TypeVar("Scalar", bound=np.generic)


class Launched(Protocol):
    """A step on its way."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def result(self) -> StepResult:
        """Wait for the step; to be called once."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """`Launched` of a step that is over."""

    step_result: StepResult

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.step_result


class Executor(Protocol):
    """Runs one plan after the other."""

    def run(self, plan: Plan) -> StepResult:
        """Run one step and return what was chosen."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


class StepExecutor:
    """`Executor` of one token per row and step."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        config: EngineConfig,
        max_pages: int,
        *,
        grammars: GrammarCompiler | None = None,
        wall_time: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._wall_time = wall_time
        self._kv = kv
        self._grammars = RowGrammars(grammars)
        self._sampler = Sampler(config.num_rows, model.facts.vocab_size, self._grammars.barrier)
        self._mirror = RowMirror(config, max_pages, model.facts.history_tokens, row_images(model, config))

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        started = self._wall_time()
        self._mirror.set_up(plan)
        for init in plan.extra.inits:
            self._sampler.set_row(init)
            self._grammars.set_row(init)
        num_rows = len(plan.rows)
        tokens = np.full((num_rows, 1), -1, np.int32)
        count = plan.sample.astype(np.int32)
        if not num_rows:
            return StepResult(step=plan.step, tokens=tokens, count=count)
        chosen = np.flatnonzero(plan.sample)
        ids = plan.tokens.astype(np.int64)
        decoding = np.flatnonzero(plan.use_next)
        ids[plan.q_start[decoding]] = self._mirror.next_token[plan.rows[decoding]]
        last = plan.q_start[chosen + 1].astype(np.int64) - 1
        batch = self._mirror.batch(plan.rows, plan.q_start, plan.seq_start, ids, last)
        rows = plan.rows[chosen]
        self._grammars.begin(rows)
        logits = self._model.forward(batch, self._kv)
        self._grammars.finish()
        if not len(chosen):
            return StepResult(step=plan.step, tokens=tokens, count=count, forward_s=self._wall_time() - started)
        # A token is chosen for the position after the row's last query token.
        positions = (plan.seq_start + np.diff(plan.q_start))[chosen].astype(np.int64)
        output = self._sampler.sample(logits, rows, positions)
        tokens[chosen, 0] = output.tokens
        self._mirror.next_token[rows] = output.tokens
        self._grammars.take(rows, tokens[chosen], count[chosen])
        return StepResult(
            step=plan.step,
            tokens=tokens,
            count=count,
            logprobs=_one_each(output.logprobs, chosen, num_rows, np.float32(np.nan)),
            top_tokens=_one_each(output.top_tokens, chosen, num_rows, np.int32(-1)),
            top_logprobs=_one_each(output.top_logprobs, chosen, num_rows, np.float32(np.nan)),
            forward_s=self._wall_time() - started,
            refused=tuple((int(chosen[i]), reason) for i, reason in self._grammars.failures(rows)),
        )

    def close(self) -> None:
        self._grammars.close()


def spread(
    values: npt.NDArray[Scalar] | None, chosen: npt.NDArray[np.intp], num_rows: int, fill: Scalar
) -> npt.NDArray[Scalar] | None:
    """Return values [m, ...] of the chosen rows as an array over all rows."""
    if values is None:
        return None
    whole = np.full((num_rows, *values.shape[1:]), fill, values.dtype)
    whole[chosen] = values
    return whole


def _one_each(
    values: npt.NDArray[Scalar] | None, chosen: npt.NDArray[np.intp], num_rows: int, fill: Scalar
) -> npt.NDArray[Scalar] | None:
    """Return values [m, ...] of one token each as [b, 1, ...]."""
    return None if values is None else spread(values[:, None], chosen, num_rows, fill)
