"""A runner without a model: tokens are a pure function of (sampling seed, position), and steps take a virtual time.

Ships for scheduler tests and for measuring the scheduler alone. Knows no torch.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from engine.plan import Plan, StepHandle, StepResult, decode_plan

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

MAX_IN_FLIGHT = 2

TokenChoice = Callable[[U64, I64], npt.NDArray[np.int32]]
"""(seeds uint64 [m], positions int64 [m]) -> token ids int32 [m]."""


def mixed_tokens(vocab_size: int, first: int = 0) -> TokenChoice:
    """Return a choice that spreads over ids first .. vocab_size - 1 (splitmix64 of seed and position)."""
    span = np.uint64(vocab_size - first)

    def choose(seeds: U64, positions: I64) -> npt.NDArray[np.int32]:
        mixed = seeds * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return (mixed % span).astype(np.int32) + np.int32(first)

    return choose


AcceptedDrafts = Callable[[U64, I64], npt.NDArray[np.int32]]
"""(seeds uint64 [m], positions int64 [m] of the next token) -> drafts that will be accepted int32 [m], at most k."""


class StubHandle:
    """A launched step whose result is known already."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def done(self) -> bool:
        return True


class StubRunner:
    """`Runner` over `choose`. `step_s` is called with each plan at collect time and may move a virtual clock.

    With `num_drafts` it speculates: decode rows bring 1 + `accepted` tokens a step (all drafts by default).
    """

    def __init__(
        self,
        num_rows: int,
        choose: TokenChoice,
        step_s: Callable[[Plan], float] | None = None,
        *,
        num_drafts: int = 0,
        accepted: AcceptedDrafts | None = None,
    ) -> None:
        self._choose = choose
        self._step_s = step_s
        self._num_drafts = num_drafts
        self._accepted = accepted
        self._length = np.zeros(num_rows, np.int64)
        self._limit = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._last_step = 0
        self._in_flight: list[tuple[StubHandle, Plan]] = []

    def launch(self, plan: bytes) -> StepHandle:
        step = decode_plan(plan)
        if step.step != self._last_step + 1:
            raise InvariantError(f"plan gap: step {step.step} after step {self._last_step}")
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise InvariantError(f"{MAX_IN_FLIGHT} steps are in flight already")
        self._last_step = step.step
        for init in step.extra.inits:
            self._seeds[init.row] = init.sampling.seed
            self._limit[init.row] = init.kv_limit
            if init.next_token >= 0:
                self._length[init.row] = len(init.token_ids) // 4 - 1
        handle = StubHandle(self._runs(step) if self._num_drafts else self._single(step))
        self._in_flight.append((handle, step))
        return handle

    def _single(self, step: Plan) -> StepResult:
        chosen = step.sample == 1
        tokens = np.full((len(step.rows), 1), -1, np.int32)
        positions = (step.seq_start + np.diff(step.q_start))[chosen].astype(np.int64)
        tokens[chosen, 0] = self._choose(self._seeds[step.rows[chosen]], positions)
        return StepResult(step=step.step, tokens=tokens, count=step.sample.astype(np.int32))

    def _runs(self, step: Plan) -> StepResult:
        decoding, planned = step.use_next == 1, np.diff(step.q_start)
        seeds, ends = self._seeds[step.rows], step.seq_start + planned
        start = np.where(decoding, self._length[step.rows], ends - 1)
        drafts = np.minimum(planned - 1, self._limit[step.rows] - start - 1)
        if self._accepted is not None:
            drafts = np.minimum(drafts, self._accepted(seeds, start + 1))
        count = np.where(step.sample == 1, np.where(decoding, 1 + drafts, 1), 0).astype(np.int32)
        self._length[step.rows] = np.where(decoding, start + count, ends)
        tokens = np.full((len(step.rows), 1 + self._num_drafts), -1, np.int32)
        owner, column = np.nonzero(np.arange(1 + self._num_drafts) < count[:, None])
        tokens[owner, column] = self._choose(seeds[owner], start[owner] + 1 + column)
        drafted = np.where(decoding, planned - 1, 0).astype(np.int32)
        return StepResult(step=step.step, tokens=tokens, count=count, drafted=drafted, computed=int(planned.sum()))

    def collect(self, handle: StepHandle) -> StepResult:
        first, plan = self._in_flight[0] if self._in_flight else (None, None)
        if handle is not first or first is None or plan is None:
            raise InvariantError("steps are collected in the order of launch, once each")
        self._in_flight.pop(0)
        if self._step_s is not None:
            self._step_s(plan)
        return first.result

    def close(self) -> None:
        self._in_flight.clear()
