"""The speculative executor over the device's model chooses what it chooses over the CPU's, recorded or not."""

import numpy as np

from core.request import SamplingParams
from engine.cache.kv_memory import KVMemory, anonymous_buffers
from engine.config import EngineConfig
from engine.plan import UNLIMITED, Plan, PlanExtra, RowInit
from engine.runner.speculative import SpeculativeExecutor
from engine.runner.warm_up import WarmUp
from tests.fakes.deepseek_driver import PAGE, text, tiny_model
from tests.fakes.device_deepseek import WideDriver, wide

PAGES, PROMPT = 4, 5


def plan(step, ids=None, length=0):
    """A prompt of row 1, or a step that verifies as many drafts as there are behind at least `length` tokens."""
    tokens = ids or [0] * 6
    deltas, inits = np.zeros((0, 3), np.int32), ()
    if ids:
        deltas = np.array([(1, c, 1 + c) for c in range(PAGES)], np.int32)
        inits = (
            RowInit(
                row=1, generation=0, sampling=SamplingParams(temperature=0.0),
                token_ids=np.array(ids, np.int32).tobytes(), num_prompt_tokens=len(ids), min_tokens=0,
                masked_until_min=(), next_token=-1, kv_limit=PAGES * PAGE,
            ),
        )  # fmt: skip
    return Plan(
        step=step, rows=np.array([1], np.int32), gens=np.zeros(1, np.uint32),
        q_start=np.array([0, len(tokens)], np.int32), seq_start=np.array([length], np.int32),
        use_next=np.array([ids is None], np.uint8), sample=np.ones(1, np.uint8), tokens=np.array(tokens, np.int32),
        table_deltas=deltas, extra=PlanExtra(inits=inits), draft_budget=UNLIMITED,
    )  # fmt: skip


def said(model, *, is_warm=False):
    """What every step chose; with `is_warm`, behind the steps that come before the first request."""
    config = EngineConfig(page_tokens=PAGE, num_pages=PAGES + 1, num_rows=2, chunk_tokens=2)
    layout = model.kv_layout(PAGES + 1, 2, PAGE)
    executor = SpeculativeExecutor(model, KVMemory(layout, anonymous_buffers(layout)), config, PAGES)
    if is_warm:
        WarmUp(config, model.facts, PAGES * PAGE, model.num_drafts).run(executor, lambda: (0, 0))
    found, length = [], 0
    for step in range(1, 4):
        result = executor.run(plan(step, text(6, PROMPT) if step == 1 else None, length))
        length += PROMPT if step == 1 else int(result.count[0])
        found.append((result.tokens[0, : result.count[0]].tolist(), int(result.drafted[0])))
    executor.close()
    return found


def test_the_speculative_executor_works_on_a_device():
    want = said(tiny_model())
    assert [drafted for _, drafted in want] == [0, 5, 5]
    model, made = WideDriver().model, []

    def record(work):
        made.append(work)
        return work

    model.record = record
    with wide():
        got = said(model, is_warm=True)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    # Verify steps and drafts of one row and of two: nothing is left to be recorded for requests.
    assert len(made) == 4
