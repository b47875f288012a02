"""`v41-mini` under the whole engine on a GPU, with and without DSpark: texts, steps and tokens per second.

Acceptance is named for what it is. *real*: the drafts of random weights, nearly all rejected. *golden*: the stages run, but
what they propose is replaced by what a run without drafts said, so that all are accepted: the most that drafts can give.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.engine_driver import Ask, EngineDriver
from benchmarks.v41_equality import GPU, facts_of, text
from benchmarks.v41_parts import RandomParts
from core.request import SamplingParams
from engine.batch import ForwardBatch
from engine.config import EngineConfig, GraphsConfig, SpeculationConfig
from engine.models.deepseek_v41.device.drafting import DeviceDrafter, DraftingDeviceModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config
from engine.models.drafter import I32, Captures, ChooseDraft, Drafter, DraftRows, Proposal
from engine.models.model import KVTensors

ROWS, PROMPT, OUTPUTS = 8, 600, 96
Golden = dict[tuple[int, int], list[int]]
"""(tokens before, token) -> the tokens that follow it."""


class ClockedDrafter:
    """Runs a drafter, counts the time of its parts, and says something else where it is told what will come."""

    def __init__(self, inner: DeviceDrafter, owner: "ClockedModel") -> None:
        self.num_drafts = inner.num_drafts
        self._inner, self._owner = inner, owner

    def observe(self, batch: ForwardBatch, captures: Captures, committed: I32) -> None:
        """As the inner one."""
        with self._owner.clock("observe"):
            self._inner.observe(batch, captures, committed)

    def propose(self, wanted: DraftRows, choose: ChooseDraft) -> Proposal:
        """Return the known tokens if there are any, with the inner one's confidences."""
        with self._owner.clock("propose"):
            found = self._inner.propose(wanted, choose)
        tokens = np.array(found.tokens)
        for i, key in enumerate(zip(wanted.lengths.tolist(), wanted.anchors.tolist(), strict=True)):
            known = self._owner.golden.get(key, [])[: self.num_drafts]
            tokens[i, : len(known)] = known
        return Proposal(tokens, found.confidences)


class ClockedModel(DraftingDeviceModel):
    """A model that counts the time of its parts, and whose drafter may know the future."""

    golden: Golden
    spent: dict[str, list[float]]

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Count the wall time of a part, the device's work included."""
        begun = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.spent.setdefault(name, []).append(time.perf_counter() - begun)

    def drafter(self, kv: KVTensors) -> Drafter:  # type: ignore[override]
        """Return the drafter over the KV memory."""
        return ClockedDrafter(super().drafter(kv), self)

    def forward_captured(self, batch: ForwardBatch, kv: KVTensors) -> tuple[torch.Tensor, Captures]:
        """As the model's."""
        with self.clock("verify"):
            return super().forward_captured(batch, kv)


def _run(
    model: ClockedModel, prompts: list[list[int]], **settings: object
) -> tuple[dict[str, object], list[list[int]]]:
    config = EngineConfig(
        page_tokens=256, num_pages=ROWS * 5 + 8, num_rows=ROWS, chunk_tokens=2048, deterministic=True, **settings
    )
    begun = time.perf_counter()
    drafts = 0 if config.speculation.mode == "off" else model.num_drafts
    model.spent = {}
    driver = EngineDriver(model, config, drafts)
    opened = time.perf_counter() - begun
    asks = [Ask(prompt, OUTPUTS, SamplingParams(temperature=0.0)) for prompt in prompts]
    driver.run(asks[:1])
    for ask in asks:
        driver.submit(ask)
    while len(driver.sink.tokens) < 1 + ROWS or min(map(len, driver.sink.tokens.values())) < 2:
        driver.loop.turn()
    before, model.spent = sum(map(len, driver.sink.tokens.values())), {}
    begun, turns = time.perf_counter(), 0
    while len(driver.sink.finished) < 1 + ROWS:
        driver.loop.turn()
        turns += 1
    wall = time.perf_counter() - begun
    tokens = sum(map(len, driver.sink.tokens.values())) - before
    texts = [driver.sink.tokens[seq] for seq in sorted(driver.sink.tokens)][1:]
    driver.close()
    parts = {name: statistics.median(times) * 1e6 for name, times in model.spent.items()}
    row: dict[str, object] = {"opened_s": opened, "steps_per_s": turns / wall, "tokens_per_s": tokens / wall,
                              "tokens_per_row_and_step": tokens / turns / ROWS, "step_us": wall / turns * 1e6, "parts_us": parts}  # fmt: skip
    return row, texts


def loop() -> dict[str, object]:
    """Run the same prompts through the engine in every way."""
    config = parse_config(mini_config())
    parts = RandomParts(config, GPU).model()
    prompts = [text(20 + i, PROMPT + 7 * i, config.vocab_size) for i in range(ROWS)]
    plain = ClockedModel(config, parts, facts_of(config))
    golden = ClockedModel(config, parts, facts_of(config))
    plain.golden = {}
    off, static = SpeculationConfig(mode="off"), SpeculationConfig(mode="static")
    result: dict[str, object] = {"rows": ROWS, "prompt": PROMPT, "outputs": OUTPUTS}
    row, texts = _run(plain, prompts, speculation=off)
    golden.golden = {
        (len(prompt) + i, said[i]): said[i + 1 :]
        for prompt, said in zip(prompts, texts, strict=True) for i in range(len(said))
    }  # fmt: skip
    runs = {
        "plain, recorded": (row, texts),
        "plain, not recorded": _run(plain, prompts, speculation=off, graphs=GraphsConfig(enabled=False)),
        "DSpark, real acceptance": _run(plain, prompts, speculation=static),
        "DSpark, golden acceptance": _run(golden, prompts, speculation=static),
    }
    for name, (found, said) in runs.items():
        same = sum(a == b for a, b in zip(said, texts, strict=True))
        result[name] = found | {"texts_equal_to_plain": same, "of": len(texts)}
        print(name, result[name], flush=True)
    return result
