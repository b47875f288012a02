"""The runner over a real model: one executor thread that runs plans in order, and the only code that touches tensors.

Row-indexed state lives here: the token each row decodes next, the mirror of the page tables, and the sampler's rows.
Knows no sequences, no pool and no tree. Steps are handed over through a queue; at most two are in flight.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from core.errors import InvariantError
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.models.model import KVTensors, Model
from engine.plan import Plan, StepHandle, StepResult, decode_plan
from engine.runner.token_history import TokenHistory
from engine.sampling import Sampler

Scalar = TypeVar("Scalar", bound=np.generic)

MAX_IN_FLIGHT = 2
MAX_ROW_TOKENS = 16
"""Most tokens of one row that a step may write and a later one take back: 1 + drafts."""


class StepTicket:
    """One launched step; written by the executor, read by the scheduler after `finished` is set."""

    def __init__(self, step: int, plan: bytes) -> None:
        self.step = step
        self.plan = plan
        self.finished = threading.Event()
        self.result: StepResult | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set()


class StepExecutor:
    """Turns plans into tokens. Used by one thread; `run` is one step."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        config: EngineConfig,
        max_pages: int,
        wall_time: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._wall_time = wall_time
        self._kv = kv
        self._page_tokens = config.page_tokens
        self._deterministic = config.deterministic
        self._sampler = Sampler(config.num_rows, model.facts.vocab_size)
        self._next_token = np.zeros(config.num_rows, np.int64)
        width = model.facts.history_tokens
        self._history = TokenHistory(config.num_rows, width, MAX_ROW_TOKENS) if width else None
        self._page_table = np.zeros((config.num_rows, max_pages), np.int64)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Run one step and return what was chosen."""
        started = self._wall_time()
        self._set_up(plan)
        num_rows = len(plan.rows)
        tokens = np.full((num_rows, 1), -1, np.int32)
        count = plan.sample.astype(np.int32)
        if not num_rows:
            return StepResult(step=plan.step, tokens=tokens, count=count)
        chosen = np.flatnonzero(plan.sample)
        logits = self._model.forward(self._batch(plan, chosen), self._kv)
        if not len(chosen):
            return StepResult(step=plan.step, tokens=tokens, count=count, forward_s=self._wall_time() - started)
        rows = plan.rows[chosen]
        # A token is chosen for the position after the row's last query token.
        positions = (plan.seq_start + np.diff(plan.q_start))[chosen].astype(np.int64)
        output = self._sampler.sample(logits, rows, positions)
        tokens[chosen, 0] = output.tokens
        self._next_token[rows] = output.tokens
        return StepResult(
            step=plan.step,
            tokens=tokens,
            count=count,
            logprobs=_spread(output.logprobs, chosen, num_rows, np.float32(np.nan)),
            top_tokens=_spread(output.top_tokens, chosen, num_rows, np.int32(-1)),
            top_logprobs=_spread(output.top_logprobs, chosen, num_rows, np.float32(np.nan)),
            forward_s=self._wall_time() - started,
        )

    def _set_up(self, plan: Plan) -> None:
        deltas = plan.table_deltas
        self._page_table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
        for init in plan.extra.inits:
            self._sampler.set_row(init)
            if init.next_token >= 0:
                self._next_token[init.row] = init.next_token
            if self._history is not None:
                start = int(plan.seq_start[np.flatnonzero(plan.rows == init.row)[0]])
                self._history.reset(init.row, np.frombuffer(init.token_ids, "<i4"), start)

    def _batch(self, plan: Plan, chosen: npt.NDArray[np.intp]) -> ForwardBatch:
        size = self._page_tokens
        lengths = np.diff(plan.q_start)
        owner = np.repeat(np.arange(len(plan.rows)), lengths)
        positions = np.arange(len(plan.tokens), dtype=np.int64) - (plan.q_start[:-1] - plan.seq_start)[owner]
        tokens = plan.tokens.astype(np.int64)
        decoding = np.flatnonzero(plan.use_next)
        tokens[plan.q_start[decoding]] = self._next_token[plan.rows[decoding]]
        used = -(-(plan.seq_start + lengths) // size)
        widest = int(used.max())
        table = self._page_table[plan.rows, :widest]
        # Columns past a row's own pages hold what earlier owners had there.
        table[np.arange(widest) >= used[:, None]] = 0
        slots = table[owner, positions // size] * size + positions % size
        history = None
        if self._history is not None:
            history = torch.from_numpy(self._history.before(plan.rows, plan.seq_start.astype(np.int64)))
            self._history.write(plan.rows, plan.q_start, positions, tokens)
        return ForwardBatch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            page_table=torch.from_numpy(table),
            rows=plan.rows,
            q_start=plan.q_start,
            seq_start=plan.seq_start,
            sample_at=torch.from_numpy(plan.q_start[chosen + 1].astype(np.int64) - 1),
            page_tokens=size,
            deterministic=self._deterministic,
            history=history,
        )


class ModelRunner:
    """`Runner` with an executor thread. After a step has failed, every later one fails with the same error."""

    def __init__(self, model: Model, kv: KVTensors, config: EngineConfig, max_pages: int) -> None:
        self._executor = StepExecutor(model, kv, config, max_pages)
        self._threads = config.threads
        self._last_step = 0
        self._in_flight = 0
        self._queue: queue.Queue[StepTicket | None] = queue.Queue(MAX_IN_FLIGHT + 1)
        self._thread = threading.Thread(target=self._run, name="tandem-executor", daemon=True)
        self._thread.start()

    def launch(self, plan: bytes) -> StepHandle:
        step = int.from_bytes(plan[4:12], "little")
        if step != self._last_step + 1:
            raise InvariantError(f"plan gap: step {step} after step {self._last_step}")
        if self._in_flight >= MAX_IN_FLIGHT:
            raise InvariantError(f"{MAX_IN_FLIGHT} steps are in flight already")
        self._last_step = step
        self._in_flight += 1
        ticket = StepTicket(step, plan)
        self._queue.put(ticket)
        return ticket

    def collect(self, handle: StepHandle) -> StepResult:
        assert isinstance(handle, StepTicket)
        handle.finished.wait()
        self._in_flight -= 1
        if handle.error is not None:
            raise handle.error
        assert handle.result is not None
        return handle.result

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        failure: BaseException | None = None
        while (ticket := self._queue.get()) is not None:
            if failure is None:
                try:
                    ticket.result = self._executor.run(decode_plan(ticket.plan))
                except Exception as error:  # noqa: BLE001 (top of the thread; `collect` raises it on the scheduler)
                    failure = error
            ticket.error = failure
            ticket.finished.set()


def _spread(
    values: npt.NDArray[Scalar] | None, chosen: npt.NDArray[np.intp], num_rows: int, fill: Scalar
) -> npt.NDArray[Scalar] | None:
    """Return values [m, ...] of the chosen rows as an array over all rows."""
    if values is None:
        return None
    whole = np.full((num_rows, *values.shape[1:]), fill, values.dtype)
    whole[chosen] = values
    return whole
