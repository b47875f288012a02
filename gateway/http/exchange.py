"""One generation request from accepted samples to the last byte: as a stream of events or as one JSON answer.

Both ways see the same pieces in the same order, so text, usage, finish reasons and log-probabilities agree.
"""

from collections.abc import Sequence

from core.clock import Clock
from gateway.generation import Generator
from gateway.http.answer import AnswerFormat, Choice, Usage
from gateway.http.client import Client
from gateway.http.errors import Headers, describe
from gateway.http.intake import Accepted
from gateway.http.keepalive import KeepAlive
from gateway.http.samples import Progress, Sample, run_samples
from gateway.http.sse import HEADERS
from gateway.text.piece import Piece

_JSON = (b"content-type", b"application/json")


class Exchange:
    """Counts and times one request; its two `answer_` methods are used once."""

    def __init__(
        self,
        accepted: Accepted,
        form: AnswerFormat,
        client: Client,
        clock: Clock,
        headers: Headers,
        *,
        keepalive_s: float = 0.0,
    ) -> None:
        """`headers` go out with the answer, whatever it is; `keepalive_s` as in `ApiConfig`."""
        self._accepted = accepted
        self._form = form
        self._client = client
        self._clock = clock
        self._headers = headers
        self._alive = KeepAlive(client, headers, form.keepalive, keepalive_s)
        self._running = len(accepted.samples)
        self._is_open = [False] * self._running
        self._choices = [Choice(index) for index in range(self._running)]
        self._cached: dict[int, int] = {}
        self.usage = Usage(accepted.num_prompt_tokens, reasoning_tokens=0 if accepted.reasons else None)
        self.first_delta_at: float | None = None

    @property
    def num_surplus(self) -> int:
        """Tokens received after a stop string had completed."""
        return sum(sample.text.num_surplus for sample in self._accepted.samples)

    async def answer_stream(self, generator: Generator) -> None:
        """Stream the answer. Errors before the first delta are raised, later ones end the stream with what the format has for it."""
        try:
            async with self._alive:
                await run_samples(generator, self._accepted.samples, self._write_events, self._write_now)
        except Exception as error:
            if not self._client.is_streaming:
                raise
            await self._client.end_stream(self._form.failure(describe(error), self.usage))
            raise

    async def answer_whole(self, generator: Generator, started_at: float) -> None:
        """Collect everything, then send one JSON body."""
        accepted_at = self._clock.now()
        await run_samples(generator, self._accepted.samples, self._collect, self._collect_now)
        now = self._clock.now()
        first = self.first_delta_at if self.first_delta_at is not None else now
        timing = b"tok;dur=%.1f, ttft;dur=%.1f, total;dur=%.1f" % (
            (accepted_at - started_at) * 1000,
            (first - started_at) * 1000,
            (now - started_at) * 1000,
        )
        self._note_timing()
        body = self._form.whole(self._choices, self.usage)
        await self._client.answer(200, [_JSON, (b"server-timing", timing), *self._headers], body)

    def _write_now(self, sample: Sample, piece: Piece) -> bool:
        """Write an ordinary piece without waiting, if that is possible: the path of almost every token."""
        index = sample.index
        if not self._is_open[index] or not self._client.takes_now or sample.prompt.timeline is not None:
            return False
        self._count_tokens(piece)
        body = self._form.piece(index, piece, self.usage)
        if body:
            self._client.stream_now(body)
        return True

    async def _write_events(self, steps: Sequence[Progress]) -> None:
        out: list[bytes] = []
        for step in steps:
            index = step.sample.index
            if step.cached_tokens is not None:
                self._count_cached(step.sample, step.cached_tokens)
            if not self._is_open[index]:
                self._is_open[index] = True
                out.append(self._form.opening(index, self.usage))
            self._count(step)
            out.append(self._form.piece(index, step.piece, self.usage))
        is_last = self._running == 0
        if is_last:
            self._alive.stop()
            self._note_timing()
            out.append(self._form.closing(self.usage))
        body = b"".join(out) if len(out) > 1 else out[0]
        if not self._client.is_streaming:
            await self._client.start_stream(200, [*HEADERS, *self._headers], body, is_last=is_last)
        elif is_last:
            await self._client.end_stream(body)
        elif body:
            await self._client.stream(body)

    def _collect_now(self, sample: Sample, piece: Piece) -> bool:
        """As `_collect`, for an ordinary piece behind the first."""
        if self.first_delta_at is None or sample.prompt.timeline is not None:
            return False
        self._count_tokens(piece)
        self._choices[sample.index].add(piece)
        return True

    async def _collect(self, steps: Sequence[Progress]) -> None:
        for step in steps:
            if step.cached_tokens is not None:
                self._count_cached(step.sample, step.cached_tokens)
            self._count(step)
            self._choices[step.sample.index].add(step.piece)

    def _count(self, step: Progress) -> None:
        if self.first_delta_at is None:
            self.first_delta_at = self._clock.now()
        self._count_tokens(step.piece)
        timeline = step.sample.prompt.timeline
        if timeline is not None:
            timeline.last_token = self._clock.now()
            timeline.first_token = timeline.first_token or timeline.last_token
        if step.piece.finish is not None:
            self._running -= 1

    def _count_tokens(self, piece: Piece) -> None:
        usage = self.usage
        usage.completion_tokens += piece.num_tokens
        if piece.reasoning_tokens and usage.reasoning_tokens is not None:
            usage.reasoning_tokens += piece.reasoning_tokens

    def _note_timing(self) -> None:
        timelines = [sample.prompt.timeline for sample in self._accepted.samples]
        told = [timeline.to_plain() for timeline in timelines if timeline is not None]
        self.usage.timing = told or None

    def _count_cached(self, sample: Sample, cached_tokens: int) -> None:
        # Samples of one prompt may hit what the first of them computed: the smallest figure is what was there before.
        number = sample.prompt_index
        self._cached[number] = min(cached_tokens, self._cached.get(number, cached_tokens))
        self.usage.cached_tokens = sum(self._cached.values())
