"""Texts of the engine on a GPU against those of the CPU, of other batches, and of steps without a recording."""

import json
import logging
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.engine_driver import Ask, EngineDriver
from core.request import SamplingParams
from engine.config import EngineConfig, GraphsConfig
from engine.models.builtin import prepare_builtin
from engine.models.registry import load_model

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.3, seed=2**63 + 5, sample_index=2, num_logprobs=0),
    SamplingParams(temperature=1.0, seed=4, top_k=5),
    SamplingParams(temperature=1.2, seed=5, top_p=0.7, num_logprobs=2),
    SamplingParams(temperature=1.5, seed=6, min_p=0.05),
    SamplingParams(temperature=1.1, seed=7, min_p=0.01, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.8, seed=8, repetition_penalty=1.3, presence_penalty=0.4, num_logprobs=4),
    SamplingParams(temperature=0.0, logit_bias={70: 4.0, 71: -3.0}),
)
PROMPTS = (
    "The capital of France is",
    "Write a short story about a robot who learns to paint.",
    "List three reasons why the sky is blue.\n1.",
    "def fibonacci(n):\n",
    "In 1969, humans first",
    "The recipe for a good pancake begins with",
    "Translate to Spanish: Good morning, my friend.\n",
    "Once upon a time, in a village by the sea,",
    "The derivative of x^2 is",
    "Water boils at",
    "A haiku about winter:\n",
    "The three primary colours are",
)
SMOLLM2_TOKENS = 48
MARGIN = 1e-3
"""Texts are compared if the two best log-probabilities never came closer."""


def asks(count: int, tokens: int) -> list[Ask]:
    """Return requests of all kinds with prompts of many lengths."""
    found = []
    for i in range(count):
        rng = random.Random(i)
        prompt = [rng.randrange(97, 120) for _ in range(3 + 37 * i % 211)]
        found.append(Ask(prompt, tokens, SAMPLINGS[i % len(SAMPLINGS)]))
    return found


def _answers(name: str, device: str, requests: list[Ask], *, stagger: int = 1, dtype: str | None = None, **settings):  # noqa: ANN003, ANN202
    folder = Path(tempfile.mkdtemp(prefix="tandem-texts-"))
    model = load_model(prepare_builtin(name, folder), device=torch.device(device), dtype=dtype)
    base = {"page_tokens": 16, "num_pages": 400, "num_rows": 12, "chunk_tokens": 96}
    driver = EngineDriver(model, EngineConfig(**{**base, **settings}))
    try:
        return driver.run(requests, stagger=stagger)
    finally:
        driver.close()


def _compared(got, want) -> dict[str, int]:  # noqa: ANN001
    equal = [a == b for (a, _), (b, _) in zip(got, want, strict=True)]
    bits = [a == b for (_, a), (_, b) in zip(got, want, strict=True)]
    return {"texts": len(equal), "equal": sum(equal), "equal_log_probabilities_to_the_bit": sum(bits)}


def tiny_texts() -> dict[str, object]:
    """Compare texts of tiny models: devices, recordings, batches, chunkings, and types."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    requests, result = asks(20, 24), {}
    off = GraphsConfig(enabled=False)

    def compare(title: str, got, want) -> None:  # noqa: ANN001
        result[title] = _compared(got, want)
        print(title, result[title], flush=True)

    for name in ("tiny-llama", "tiny-window", "tiny-llama-f64"):
        want = _answers(name, "cpu", requests)
        recorded = _answers(name, "cuda", requests)
        compare(f"{name}: GPU against CPU", recorded, want)
        compare(f"{name}: one by one against batched", _answers(name, "cuda", requests, stagger=400), recorded)
        compare(f"{name}: other chunks", _answers(name, "cuda", requests, stagger=3, chunk_tokens=33), recorded)
        compare(f"{name}: recording off", _answers(name, "cuda", requests, graphs=off), recorded)
        fast = _answers(name, "cuda", requests, deterministic=False)
        compare(f"{name}: not deterministic, GPU against CPU", fast, want)
        again = _answers(name, "cuda", requests, deterministic=False, graphs=off)
        compare(f"{name}: not deterministic, recording off", again, fast)
    recorded = _answers("tiny-llama", "cuda", requests, dtype="bf16")
    compare("bf16: one by one", _answers("tiny-llama", "cuda", requests, dtype="bf16", stagger=400), recorded)
    compare("bf16: recording off", _answers("tiny-llama", "cuda", requests, dtype="bf16", graphs=off), recorded)
    return result


def smollm2_texts(directory: Path, device: torch.device) -> list[dict[str, object]]:
    """Return greedy texts of SmolLM2 in float32 with the smallest margin between the two best tokens."""
    tokenizer = __import__("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = load_model(directory, dtype="f32", device=device, verify=False)
    driver = EngineDriver(model, EngineConfig(page_tokens=16, num_pages=400, num_rows=16, chunk_tokens=256))
    requests = [
        Ask(tokenizer.encode(p).ids, SMOLLM2_TOKENS, SamplingParams(temperature=0.0, num_logprobs=2)) for p in PROMPTS
    ]
    found: list[dict[str, object]] = []
    for prompt, (tokens, logprobs) in zip(PROMPTS, driver.run(requests), strict=True):
        margin = min(item.top[0][1] - item.top[1][1] for item in logprobs)
        found.append({"prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens), "margin": margin})
    driver.close()
    return found


def compare_smollm2(directory: Path, cpu_texts: Path) -> dict[str, object]:
    """Compare SmolLM2's texts on the GPU with a CPU's, for prompts whose margin is large enough."""
    want = json.loads(cpu_texts.read_text())
    got = smollm2_texts(directory, torch.device("cuda", 0))
    rows = [
        {"prompt": a["prompt"], "cpu_margin": a["margin"], "equal": a["tokens"] == b["tokens"], "text": b["text"]}
        for a, b in zip(want, got, strict=True)
    ]
    clear = [row for row in rows if row["cpu_margin"] > MARGIN]
    result = {"prompts": len(rows), "with_margin": len(clear), "equal_with_margin": sum(row["equal"] for row in clear),
              "equal": sum(row["equal"] for row in rows), "tokens_each": SMOLLM2_TOKENS, "rows": rows}  # fmt: skip
    print({k: v for k, v in result.items() if k != "rows"}, flush=True)
    return result
