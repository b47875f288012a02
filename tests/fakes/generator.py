"""A generator that plays scripts: what the HTTP layer is tested and measured against, in place of a cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.request import FinishReason
from gateway.generation import Delta, Prompt, ServedModel, Tap

Step = Delta | Exception | asyncio.Event | float
"""Yield it, raise it, wait for it, or sleep so many seconds."""
Script = Callable[[Prompt], Iterable[Step]]

DEFAULT_MODEL = ServedModel(name="tiny", max_tokens_total=4096, vocab_size=400, eos_token_ids=(2,))


def fake_logprob(token: int, num: int) -> TokenLogprobs:
    """A made-up but reproducible entry with `num` alternatives."""
    top = tuple(((token + k) % 400, -0.25 * (k + 1)) for k in range(num))
    return TokenLogprobs(token=token, logprob=-0.25, top=top)


def play(
    tokens: Sequence[int],
    *,
    chunk: int = 1,
    finish: FinishReason = FinishReason.LENGTH,
    cached: int = 0,
    num_logprobs: int = -1,
) -> list[Delta]:
    """Deltas of `chunk` tokens each; the last carries `finish`, the first the cached tokens."""
    cuts = [tuple(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)] or [()]
    return [
        Delta(
            token_ids=cut,
            logprobs=tuple(fake_logprob(t, num_logprobs) for t in cut) if num_logprobs >= 0 else (),
            finish=finish if index == len(cuts) - 1 else None,
            num_cached_tokens=cached if index == 0 else None,
        )
        for index, cut in enumerate(cuts)
    ]


def obedient(tokens: Sequence[int], *, chunk: int = 1, cached: int = 0, eos: Sequence[int] = (2,)) -> Script:
    """Plays `tokens` as an engine would: stops at max_tokens, at a stop id, at end-of-text unless told to ignore it."""

    def script(prompt: Prompt) -> list[Delta]:
        stops = set(prompt.stop.stop_token_ids) | (set() if prompt.stop.ignore_eos else set(eos))
        out: list[int] = []
        finish = FinishReason.LENGTH
        for token in tokens[: prompt.stop.max_tokens]:
            out.append(token)
            if token in stops:
                finish = FinishReason.STOP
                break
        return play(out, chunk=chunk, finish=finish, cached=cached, num_logprobs=prompt.sampling.num_logprobs)

    return script


class ScriptedGenerator:
    """Implements `gateway.generation.Generator`; remembers what was asked and how each sample ended."""

    def __init__(self, script: Script, models: Sequence[ServedModel] = (DEFAULT_MODEL,)) -> None:
        self.script = script
        self.served = tuple(models)
        self.prompts: list[Prompt] = []
        self.num_open = 0
        self.num_yielded = 0
        self.num_aborted = 0
        self.aborted = asyncio.Event()
        """Set when an iterator is closed before its last delta."""
        self._opened = asyncio.Event()
        self._streams: list[AsyncIterator[Delta]] = []
        """Kept alive, so that only an explicit close ends them, not the garbage collector."""

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    async def wait_open(self, number: int) -> None:
        """Return when so many samples are being generated."""
        while self.num_open < number:
            self._opened.clear()
            await self._opened.wait()

    def generate(self, prompt: Prompt, tap: Tap | None = None) -> AsyncIterator[Delta]:
        stream = self._play(prompt, tap)
        self._streams.append(stream)
        return stream

    async def _play(self, prompt: Prompt, tap: Tap | None) -> AsyncIterator[Delta]:
        self.prompts.append(prompt)
        self.num_open += 1
        self._opened.set()
        is_over = False
        try:
            for step in self.script(prompt):
                match step:
                    case Delta():
                        self.num_yielded += 1
                        is_over = step.finish is not None
                        if tap is None or is_over or step.num_cached_tokens is not None:
                            yield step
                        elif not tap(step):
                            yield Delta()
                    case asyncio.Event():
                        await step.wait()
                    case float():
                        await asyncio.sleep(step)
                    case _:
                        is_over = isinstance(step, TandemError)
                        raise step
        finally:
            self.num_open -= 1
            if not is_over:
                self.num_aborted += 1
                self.aborted.set()
