"""The runner over an executor: one thread that runs plans in order, and the only one that touches tensors.

Knows no sequences, no pool and no tree. Steps are handed over through a queue; at most two are in flight.
"""

import queue
import threading

import torch

from core.errors import InvariantError
from engine.config import EngineConfig
from engine.device import make_current
from engine.grammar.compiler import GrammarCompiler
from engine.models.drafter import SpeculativeModel
from engine.models.model import KVTensors, Model
from engine.plan import Plan, StepHandle, StepResult, decode_plan
from engine.runner.device_executor import DeviceExecutor
from engine.runner.device_stream import stream_of
from engine.runner.executor import Computed, Executor, Launched, StepExecutor
from engine.runner.speculative import SpeculativeExecutor
from engine.runner.warm_up import WarmUp

MAX_IN_FLIGHT = 2


class StepTicket:
    """One launched step; written by the executor, read by the scheduler after `finished` is set.

    On a device that means queued: the result is waited for by who reads it.
    """

    def __init__(self, step: int, plan: bytes) -> None:
        self.step = step
        self.plan = plan
        self.finished = threading.Event()
        self.launched: Launched | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set() and (self.launched is None or self.launched.done())


class ModelRunner:
    """`Runner` with an executor thread. After a step has failed, every later one fails with the same error."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        config: EngineConfig,
        max_pages: int,
        grammars: GrammarCompiler | None = None,
        *,
        executor: Executor | DeviceExecutor | None = None,
    ) -> None:
        """Without `grammars` no request may have one. `executor`: run this one, not what fits the model."""
        self._executor: Executor | DeviceExecutor
        drafts = 0
        if executor is not None:
            self._executor = executor
        elif config.speculation.mode != "off" and isinstance(model, SpeculativeModel):
            self._executor = SpeculativeExecutor(model, kv, config, max_pages, grammars=grammars)
            drafts = model.num_drafts
        elif model.device.type != "cpu":
            self._executor = DeviceExecutor(model, kv, config, max_pages, grammars=grammars)
        else:
            self._executor = StepExecutor(model, kv, config, max_pages, grammars=grammars)
        if config.warm_up and model.device.type != "cpu":
            room = min(model.facts.max_positions, max_pages * config.page_tokens)
            WarmUp(config, model.facts, room, drafts).run(self._executor, stream_of(model.device).used_bytes)
        self._threads = config.threads
        self._device = model.device
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
        assert handle.launched is not None
        return handle.launched.result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _launch(self, plan: Plan) -> Launched:
        if isinstance(self._executor, DeviceExecutor):
            return self._executor.launch(plan)
        result = self._executor.run(plan)
        if self._device.type != "cpu":
            # A step that chose no token did not wait for its KV, which peers may read once the step is over.
            torch.cuda.current_stream(self._device).synchronize()
        return Computed(result)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        make_current(self._device)
        failure: BaseException | None = None
        while (ticket := self._queue.get()) is not None:
            if failure is None:
                try:
                    ticket.launched = self._launch(decode_plan(ticket.plan))
                except Exception as error:  # noqa: BLE001 (top of the thread; `collect` raises it on the scheduler)
                    failure = error
            ticket.error = failure
            ticket.finished.set()
        self._executor.close()
