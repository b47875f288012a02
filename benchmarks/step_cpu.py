"""CPU time of one steady decode step by phase, with the model stubbed out: what the scheduler itself costs.

Runs the product's own loop, engine and plan on `StubRunner`. The limit beside each figure is the design's budget at
256 rows (plan 120, launch 60, process 80, emit 20 us). `--record` keeps the figures.
"""

import argparse
import gc
import json
from dataclasses import asdict, fields

from benchmarks.record import write_record
from core.clock import SystemClock
from core.hashing import Namespace, PageHasher
from core.ids import fresh_request_id
from core.kv import Component, ComponentKind, KVLayout
from core.request import GenerateRequest, SamplingParams, StopRules
from engine.barrier import SoloBarrier
from engine.cache.hit import PAGES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import StepEvents
from engine.loop import PhaseTimes, StepLoop
from engine.runner.stub_runner import StubRunner, mixed_tokens

PAGE_TOKENS = 64
PROMPT_TOKENS = 200
VOCAB = 50_000
BUDGET_US = {"ingest": 30.0, "plan": 120.0, "launch": 60.0, "process": 80.0, "emit": 20.0}


class Facts:
    """A model of which only these numbers exist."""

    vocab_size = VOCAB
    max_positions = 65_536
    eos_token_ids = (0,)
    images = None
    reuse = PAGES


class EmptyInbox:
    """Nobody calls; the benchmark drives the loop itself."""

    is_closed = False

    def run_some(self, engine: Engine, limit: int) -> int:  # noqa: ARG002 - the loop's Protocol
        """Run nothing."""
        return 0

    def wait(self, timeout_s: float) -> None:
        """Never sleep."""


class CountingSink:
    """Counts tokens and forgets them."""

    def __init__(self) -> None:
        self.tokens = 0

    def emit(self, events: StepEvents) -> None:
        """Count."""
        self.tokens += len(events.tokens)


def make_loop(rows: int, steps: int, drafts: int = 0) -> tuple[StepLoop, CountingSink]:
    """Return a loop whose engine runs `rows` sequences that are all past their prompt; half of all drafts are right."""
    pages = rows * ((PROMPT_TOKENS + steps * (1 + drafts)) // PAGE_TOKENS + 3) + 8
    config = EngineConfig(page_tokens=PAGE_TOKENS, num_pages=pages, num_rows=rows, chunk_tokens=8192)
    component = Component(
        name="kv",
        kind=ComponentKind.PAGED,
        record_bytes=64,
        num_records=pages,
        stride_bytes=64,
        capacity_tokens=PAGE_TOKENS,
    )
    layout = KVLayout(page_tokens=PAGE_TOKENS, components=(component,))
    namespace = Namespace(model="stub", revision="0", tokenizer="0", kv_dtype="u8", page_tokens=PAGE_TOKENS)
    hasher = PageHasher(b"benchmark", namespace.encode(), PAGE_TOKENS)
    clock, sink = SystemClock(), CountingSink()
    engine = Engine(config=config, facts=Facts(), layout=layout, hasher=hasher, clock=clock, num_drafts=drafts)
    for number in range(rows):
        request = GenerateRequest(
            request_id=fresh_request_id(),
            model="stub",
            token_ids=tuple((number * 31 + i) % VOCAB for i in range(PROMPT_TOKENS)),
            num_prompt_tokens=PROMPT_TOKENS,
            sampling=SamplingParams(seed=number),
            stop=StopRules(max_tokens=60_000, ignore_eos=True),
        )
        engine.submit(request, clock.now() + 3600)
    runner = StubRunner(rows, mixed_tokens(VOCAB), num_drafts=drafts, accepted=lambda _, at: (at % (1 + drafts)) // 2)
    loop = StepLoop(engine=engine, runner=runner, inbox=EmptyInbox(), sink=sink, clock=clock, barrier=SoloBarrier())
    while sink.tokens < rows * 4:
        loop.turn()
    return loop, sink


def measure(rows: int, steps: int, repeats: int, drafts: int = 0) -> dict[str, float]:
    """Return the median over `repeats` of the mean microseconds per step and phase."""
    loop, sink = make_loop(rows, steps * (repeats + 1), drafts)
    runs: list[dict[str, float]] = []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        loop.times = PhaseTimes()
        before = sink.tokens
        for _ in range(steps):
            loop.turn()
        if sink.tokens - before < rows * steps or (not drafts and sink.tokens - before > rows * steps):
            raise RuntimeError("the run was not steady: rows were missing from some steps")
        phases = {k: v for k, v in asdict(loop.times).items() if k not in {"passes", "steps", "collect_wait"}}
        runs.append({name: 1e6 * seconds / steps for name, seconds in phases.items()})
    gc.unfreeze()
    median = {name: sorted(run[name] for run in runs)[repeats // 2] for name in runs[0]}
    return {**{k: round(v, 1) for k, v in median.items()}, "total": round(sum(median.values()), 1)}


def main() -> None:
    """Print the table; `--record` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--drafts", type=int, default=0, help="verify so many drafts per row and step")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    result = {str(rows): measure(rows, options.steps, options.repeats, options.drafts) for rows in options.rows}
    names = [f.name for f in fields(PhaseTimes) if f.name in BUDGET_US]
    print(f"{'rows':>6}" + "".join(f"{name:>10}" for name in [*names, "total"]) + "   us of CPU per step")
    for rows, figures in result.items():
        print(f"{rows:>6}" + "".join(f"{figures[name]:>10}" for name in [*names, "total"]))
    print(
        "budget" + "".join(f"{BUDGET_US[name]:>10}" for name in names) + f"{sum(BUDGET_US.values()):>10}   at 256 rows"
    )
    if options.record:
        note = (
            "Median of repeats of the mean over steps; page growth and stop checks included; the model is stubbed out."
        )
        path = write_record(
            "step_cpu",
            {"us_per_step": result, "budget_us_at_256": BUDGET_US, "steps": options.steps, "drafts": options.drafts},
            note=note,
        )
        print(json.dumps({"record": path.name}))


if __name__ == "__main__":
    main()
