"""One engine over a loaded model on any device, driven pass by pass: scheduler, step loop, runner and sampler as shipped."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.clock import SystemClock
from core.handover import TokenLogprobs
from core.hashing import Namespace, PageHasher
from core.ids import fresh_request_id
from core.request import GenerateRequest, SamplingParams, StopRules
from engine.barrier import SoloBarrier
from engine.cache.kv_memory import KVMemory, region_sizes
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import StepEvents
from engine.loop import StepLoop
from engine.models.model import Model
from engine.runner.model_runner import ModelRunner

FAR_S = 1e6


class NoInbox:
    """Nobody calls; the owner drives the loop itself."""

    is_closed = False

    def run_some(self, engine: Engine, limit: int) -> int:  # noqa: ARG002 - the loop's Protocol
        """Run nothing."""
        return 0

    def wait(self, timeout_s: float) -> None:
        """Never sleep."""


class TextSink:
    """Keeps what sequences were answered."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.finished: set[int] = set()

    def emit(self, events: StepEvents) -> None:
        """Keep."""
        for seq, token in zip(events.seqs.tolist(), events.tokens.tolist(), strict=True):
            self.tokens[seq].append(token)
        for seq, items in events.logprobs.items():
            self.logprobs[seq].extend(items)
        self.finished.update(item.seq for item in events.finished)


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams


class EngineDriver:
    """Engine, loop and runner of one model; `close` it."""

    def __init__(self, model: Model, config: EngineConfig, num_drafts: int = 0) -> None:
        """`num_drafts`: of a model whose drafter is to be used."""
        layout = model.kv_layout(config.num_pages, config.num_rows, config.page_tokens)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=model.device) for size in region_sizes(layout)]
        clock = SystemClock()
        facts = model.facts
        namespace = Namespace(
            model=facts.name, revision="0", tokenizer="0", kv_dtype=facts.kv_dtype, page_tokens=config.page_tokens
        )
        hasher = PageHasher(b"benchmark", namespace.encode(), config.page_tokens)
        self.memory = KVMemory(layout, buffers)
        self.clock = clock
        self.engine = Engine(
            config=config, facts=facts, layout=layout, hasher=hasher, clock=clock, num_drafts=num_drafts
        )
        self.runner = ModelRunner(model, self.memory, config, self.engine.capacity.max_pages)
        self.sink = TextSink()
        self.loop = StepLoop(
            engine=self.engine, runner=self.runner, inbox=NoInbox(), sink=self.sink, clock=clock, barrier=SoloBarrier()
        )

    def submit(self, ask: Ask) -> int:
        """Queue a request; returns its sequence."""
        request = GenerateRequest(
            request_id=fresh_request_id(),
            model="m",
            token_ids=tuple(ask.prompt),
            num_prompt_tokens=len(ask.prompt),
            sampling=ask.sampling,
            stop=StopRules(max_tokens=ask.max_tokens, ignore_eos=True),
        )
        return self.engine.submit(request, self.clock.now() + FAR_S)

    def run(self, asks: Sequence[Ask], *, stagger: int = 0) -> list[tuple[list[int], list[TokenLogprobs]]]:
        """Answer requests, `stagger` passes apart; returns (tokens, log-probabilities) of each."""
        seqs: list[int] = []
        for ask in asks:
            seqs.append(self.submit(ask))
            for _ in range(stagger):
                self.loop.turn()
        while not self.sink.finished.issuperset(seqs):
            self.loop.turn()
        return [(self.sink.tokens[seq], self.sink.logprobs[seq]) for seq in seqs]

    def close(self) -> None:
        """End the executor."""
        while self.loop.turn():
            pass
        self.runner.close()
