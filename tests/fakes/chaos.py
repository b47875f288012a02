"""Many concurrent streams with random cancellations against a real gateway, and the verdict on what came back."""

import asyncio
import json
import random
from dataclasses import dataclass, field

import httpx

from tests.fakes.truth import scripted_text


@dataclass
class Outcome:
    """What one client saw."""

    prompt: str
    expected: str
    max_tokens: int
    status: int = 0
    text: str = ""
    cancelled: bool = False
    finishes: list[str] = field(default_factory=list)
    dones: int = 0
    errors: list[str] = field(default_factory=list)
    broken: str = ""
    completion_tokens: int | None = None


def faults(outcome: Outcome) -> list[str]:
    """Every way in which one outcome breaks the promise: one terminal reply, right text."""
    found = []
    name = repr(outcome.prompt[:24])
    if outcome.cancelled:
        if not outcome.expected.startswith(outcome.text):
            found.append(f"{name}: cancelled stream carried wrong text {outcome.text!r}")
        return found
    if outcome.broken:
        found.append(f"{name}: connection broke: {outcome.broken}")
    if outcome.status != 200:
        found.append(f"{name}: status {outcome.status}: {outcome.errors}")
        return found
    terminals = len(outcome.finishes) + len(outcome.errors)
    if terminals != 1:
        found.append(f"{name}: {terminals} terminal replies ({outcome.finishes}, {outcome.errors})")
    if outcome.errors:
        found.append(f"{name}: ended with an error: {outcome.errors}")
    elif outcome.dones != 1:
        found.append(f"{name}: {outcome.dones} [DONE] lines")
    if outcome.finishes and outcome.text != outcome.expected:
        found.append(f"{name}: wrong text {outcome.text!r}, expected {outcome.expected!r}")
    return found


async def one_stream(client: httpx.AsyncClient, model: str, outcome: Outcome, cancel_after: int | None) -> Outcome:
    """Run one stream to its end, or leave after `cancel_after` pieces of text."""
    body = {
        "model": model,
        "prompt": outcome.prompt,
        "max_tokens": outcome.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            outcome.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                outcome.errors.append(response.text)
                return outcome
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    outcome.dones += 1
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.errors.append(json.dumps(event["error"]))
                    continue
                if event.get("usage"):
                    outcome.completion_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    if choice.get("text"):
                        outcome.text += choice["text"]
                        pieces += 1
                    if choice.get("finish_reason"):
                        outcome.finishes.append(choice["finish_reason"])
                if cancel_after is not None and pieces >= cancel_after and not outcome.finishes:
                    outcome.cancelled = True
                    return outcome
    except httpx.HTTPError as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    return outcome


async def storm(
    base_url: str,
    model: str,
    work: list[tuple[str, str, int]],
    *,
    concurrency: int,
    cancel_share: float,
    seed: int,
    early_share: float = 0.0,
) -> list[Outcome]:
    """Run (prompt, expected text, max_tokens) items, `concurrency` at a time; a share of them is cancelled midway.

    Another share leaves within half a second, whatever has come by then: most of them before their first token.
    """
    rng = random.Random(seed)
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency + 8)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:

        async def run(item: tuple[str, str, int], cancel_after: int | None, stay_s: float | None) -> Outcome:
            outcome = Outcome(item[0], item[1], item[2])
            async with gate:
                try:
                    async with asyncio.timeout(stay_s):
                        await one_stream(client, model, outcome, cancel_after)
                except TimeoutError:
                    outcome.cancelled = True
                return outcome

        cancels = [rng.randint(1, 6) if rng.random() < cancel_share else None for _ in work]
        stays = [rng.uniform(0.0, 0.5) if rng.random() < early_share else None for _ in work]
        runs = zip(work, cancels, stays, strict=True)
        return list(await asyncio.gather(*(run(item, cancel, stay) for item, cancel, stay in runs)))


async def insistent_storm(
    base_url: str, model: str, work: list[tuple[str, str, int]], concurrency: int, seed: int
) -> tuple[list[Outcome], int]:
    """A storm while gateways are replaced: (outcomes, how many requests were sent again).

    A kept connection may be closed just as it is used again: HTTP leaves that race to the client, and every public one
    sends a request again whose answer had not begun. A stream that had begun is never repeated.
    """
    found = await storm(base_url, model, work, concurrency=concurrency, cancel_share=0, seed=seed)
    unheard = {o.prompt for o in found if o.broken and not o.status}
    again = [item for item in work if item[0] in unheard]
    kept = [o for o in found if o.prompt not in unheard]
    return kept + await storm(base_url, model, again, concurrency=concurrency, cancel_share=0, seed=seed), len(again)


def work(count: int, seed: int) -> list[tuple[str, str, int]]:
    """Return (prompt, true text, max_tokens) items; half of the prompts share a beginning of some pages."""
    rng = random.Random(seed)
    shared = "A common beginning that several prompts share, long enough for some pages. " * 3
    items = []
    for number in range(count):
        head = shared if rng.random() < 0.5 else ""
        prompt = f"{head}request {number} " + "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 400)))
        max_tokens = rng.randint(1, 80)
        items.append((prompt, scripted_text(prompt, max_tokens), max_tokens))
    return items
