"""Turns plans into tokens on a device, one per row and step, without waiting for it: the next step may be queued while
one computes, because the tokens it begins with never leave the device.

`launch` queues, the pending step waits. Rows with rules that only the host knows (bias, masks, penalties, grammars)
make their step wait for its logits. Executor thread only, except for pending steps. Knows no sequences, no pool, no tree.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.row_grammars import RowGrammars
from engine.models.model import GraphModel, KVTensors, Model
from engine.plan import Plan, StepResult
from engine.runner.decode_graphs import DecodeGraphs, tiers_of
from engine.runner.device_mirror import DeviceMirror, StepShape
from engine.runner.device_sampler import DeviceChoice, DeviceSampler
from engine.runner.device_stream import DeviceStream, StreamEvent, stream_of
from engine.runner.executor import spread
from engine.runner.row_images import row_images
from engine.sampling import ChoiceParams, SampleOutput, Sampler

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_BUFFERS = 3


_BLANK = Plan(
    step=0,
    rows=np.zeros(0, np.int32),
    gens=np.zeros(0, np.uint32),
    q_start=np.zeros(1, np.int32),
    seq_start=np.zeros(0, np.int32),
    use_next=np.zeros(0, np.uint8),
    sample=np.zeros(0, np.uint8),
    tokens=np.zeros(0, np.int32),
    table_deltas=np.zeros((0, 3), np.int32),
)


@dataclass(slots=True)
class _Finished:
    """When the last step's result was there: a step queued before that began then."""

    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _OnHost:
    """The rows of a step that the host chose for."""

    at: npt.NDArray[np.intp]  # [n] indices into the m rows that choose
    output: SampleOutput


@dataclass(slots=True)
class PendingStep:
    """A step in the device's queue. `result` may be called once, by any thread."""

    plan: Plan
    chosen: npt.NDArray[np.intp]
    tokens: torch.Tensor  # int64 [m] pinned; valid after the event
    event: StreamEvent
    wall_time: Callable[[], float]
    started: float
    last: _Finished
    params: ChoiceParams
    on_host: _OnHost | None = None
    logprobs: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    refused: tuple[tuple[int, str], ...] = ()

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        return self.event.done()

    def result(self) -> StepResult:
        """Wait for the device and return what was chosen."""
        self.event.wait()
        num_rows, chosen = len(self.plan.rows), self.chosen
        count = self.plan.sample.astype(np.int32)
        tokens = np.full((num_rows, 1), -1, np.int32)
        output = self._output()
        tokens[chosen, 0] = output.tokens
        logprobs, top_tokens, top_logprobs = output.logprobs, output.top_tokens, output.top_logprobs
        nan = np.float32(np.nan)
        now = self.wall_time()
        began, self.last.at = max(self.started, self.last.at), now
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            count=count,
            logprobs=spread(None if logprobs is None else logprobs[:, None], chosen, num_rows, nan),
            top_tokens=spread(None if top_tokens is None else top_tokens[:, None], chosen, num_rows, np.int32(-1)),
            top_logprobs=spread(None if top_logprobs is None else top_logprobs[:, None], chosen, num_rows, nan),
            forward_s=now - began if num_rows else 0.0,
            refused=self.refused,
        )

    def _output(self) -> SampleOutput:
        """Join what the device and the host chose."""
        tokens = self.tokens[: len(self.chosen)].numpy().astype(np.int32)
        wanted = self.params.num_logprobs
        width = int(wanted.max(initial=-1))
        logprobs = np.full(len(tokens), np.nan, np.float32)
        top_tokens = np.full((len(tokens), max(width, 0)), -1, np.int32)
        top_logprobs = np.full(top_tokens.shape, np.nan, np.float32)
        if self.logprobs is not None and self.top_tokens is not None:
            asked = np.flatnonzero(wanted >= 0)
            found = self.logprobs.numpy()
            logprobs[asked] = found[:, 0]
            there = np.arange(found.shape[1] - 1) < wanted[asked][:, None]
            columns = slice(found.shape[1] - 1)
            top_tokens[asked, columns] = np.where(there, self.top_tokens.numpy(), -1)
            top_logprobs[asked, columns] = np.where(there, found[:, 1:], np.nan)
        if self.on_host is not None:
            at, output = self.on_host.at, self.on_host.output
            tokens[at] = output.tokens
            if output.logprobs is not None:
                logprobs[at] = output.logprobs
            if output.top_tokens is not None and output.top_logprobs is not None:
                columns = slice(output.top_tokens.shape[1])
                top_tokens[at, columns], top_logprobs[at, columns] = output.top_tokens, output.top_logprobs
        if width < 0:
            return SampleOutput(tokens)
        return SampleOutput(tokens, logprobs, top_tokens if width else None, top_logprobs if width else None)


class DeviceExecutor:
    """Executor of a model on a device; records decode steps when it is made, if the model can be recorded."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        config: EngineConfig,
        max_pages: int,
        *,
        grammars: GrammarCompiler | None = None,
        stream: DeviceStream | None = None,
        wall_time: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`stream`: where to queue (default: a queue of the model's device)."""
        self._model = model
        self._kv = kv
        self._wall_time = wall_time
        self._last = _Finished()
        self._shape = StepShape(0, 0, 0)
        self._stream = stream or stream_of(model.device)
        self._grammars = RowGrammars(grammars)
        self._sampler = Sampler(config.num_rows, model.facts.vocab_size, self._grammars.barrier)
        with self._stream.active(), torch.inference_mode():
            facts = model.facts
            self._device_sampler = DeviceSampler(config.num_rows, facts.vocab_size, self._stream)
            self._mirror = DeviceMirror(
                config, max_pages, self._stream, facts.history_tokens, row_images(model, config)
            )
            self._tokens = [self._stream.pinned(config.num_rows, torch.int64) for _ in range(_BUFFERS)]
            self._graphs = self._record(config)

    def run(self, plan: Plan) -> StepResult:
        """Run one step and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        """Queue a step. What an earlier one left in memory that is used again must have been fetched but for the last."""
        started = self._wall_time()
        with self._stream.active():
            for init in plan.extra.inits:
                self._sampler.set_row(init)
                self._grammars.set_row(init)
            chosen = np.flatnonzero(plan.sample)
            rows = plan.rows[chosen]
            positions = (plan.seq_start + np.diff(plan.q_start))[chosen].astype(np.int64)
            self._grammars.begin(rows)
            logits = self._forward(plan, chosen)
            self._grammars.finish()
            params = self._sampler.params(rows)
            pending = PendingStep(
                plan=plan,
                chosen=chosen,
                tokens=self._tokens[plan.step % _BUFFERS],
                event=self._stream.mark(),
                wall_time=self._wall_time,
                started=started,
                last=self._last,
                params=params,
            )
            if logits is not None and len(chosen):
                self._choose(pending, logits[: len(chosen)], rows, positions)
                pending.event = self._stream.mark()
        return pending

    def close(self) -> None:
        """End its threads."""
        self._grammars.close()

    def _forward(self, plan: Plan, chosen: npt.NDArray[np.intp]) -> torch.Tensor | None:
        """Stage and queue a step; returns logits [at least m, vocab], None if it has no rows."""
        self._mirror.take_floors(plan)
        decodes = self._graphs is not None and len(plan.rows) and self._mirror.is_plain(plan)
        if self._graphs is None or not decodes:
            self._shape = StepShape(len(plan.rows), len(plan.tokens), len(chosen))
            self._mirror.stage(plan, self._shape, chosen)
            return self._model.forward(self._mirror.batch(self._shape, plan), self._kv) if len(plan.rows) else None
        self._shape = self._graphs.shape(len(plan.rows))
        self._mirror.stage(plan, self._shape, chosen)
        replayed = self._graphs.replay(self._shape)
        return self._decode(self._shape) if replayed is None else replayed

    def _decode(self, shape: StepShape) -> torch.Tensor:
        return self._model.forward(self._mirror.batch(shape), self._kv)

    def _record(self, config: EngineConfig) -> DecodeGraphs | None:
        """Return decode steps by tier, recorded if that is wanted; None if the model cannot be recorded."""
        graphs = DecodeGraphs(self._stream, tiers_of(config))
        if not isinstance(self._model, GraphModel):
            return None
        if not self._model.graph_ready(self._mirror.batch(graphs.shape(config.num_rows))):
            return None
        if config.graphs.enabled:
            none = np.zeros(0, np.intp)
            # Padding only: nothing is stored.
            graphs.record(lambda shape: self._mirror.stage(_BLANK, shape, none), self._decode)
        return graphs

    def _choose(self, pending: PendingStep, logits: torch.Tensor, rows: I32, positions: I64) -> None:
        """Choose a token a row, keep it as the next one, and queue what goes to the host."""
        by_host = self._sampler.on_host(rows, positions)
        params = pending.params
        choice = self._device_sampler.choose(logits, params, positions)
        tokens = choice.tokens
        if by_host.any():
            at = np.flatnonzero(by_host)
            pending.on_host, settled = self._choose_on_host(logits, rows, positions, at)
            tokens[torch.from_numpy(at).to(tokens.device)] = settled
            pending.refused = tuple((int(pending.chosen[i]), why) for i, why in self._grammars.failures(rows))
        self._mirror.keep(self._shape, tokens)
        self._fetch(pending, choice)

    def _choose_on_host(
        self, logits: torch.Tensor, rows: I32, positions: I64, at: npt.NDArray[np.intp]
    ) -> tuple[_OnHost, torch.Tensor]:
        """Wait for the logits of some rows and choose for them; returns that, and the tokens int64 [n] on the device."""
        host = logits[torch.from_numpy(at).to(logits.device)].cpu().numpy()
        own = rows[at]
        output = self._sampler.settle(host, own, self._sampler.choose(host, own, positions[at]))
        self._grammars.take(own, output.tokens[:, None], np.ones(len(at), np.int32))
        return _OnHost(at, output), torch.from_numpy(output.tokens.astype(np.int64)).to(logits.device)

    def _fetch(self, pending: PendingStep, choice: DeviceChoice) -> None:
        pending.tokens[: len(choice.tokens)].copy_(choice.tokens, non_blocking=True)
        if choice.logprobs is not None and choice.top_tokens is not None:
            pending.logprobs = self._pinned_copy(choice.logprobs)
            pending.top_tokens = self._pinned_copy(choice.top_tokens)

    def _pinned_copy(self, values: torch.Tensor) -> torch.Tensor:
        copy = self._stream.pinned(values.numel(), values.dtype).view(values.shape)
        return copy.copy_(values, non_blocking=True)
