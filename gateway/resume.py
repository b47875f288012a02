"""The output a client has received, and the request that continues from it.

Pure. Tokens are counted by position, so duplicates and gaps of any worker show; a continued request carries prompt
and received tokens apart, and needs no worker at all if what was received already ends it.
"""

from collections.abc import Sequence

from core.errors import TransferFailed
from core.handover import TokenLogprobs
from core.ids import PageHash, RequestId
from core.request import FinishReason, Floors, GenerateRequest, StopRules, with_floors
from core.tracing.api import current_traceparent
from gateway.generation import Prompt


class Output:
    """Output tokens of one request over all attempts: each position once, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def accept(
        self, position: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        """Take a run that starts at output index `position`; return its new part.

        Raises `TransferFailed` if tokens before it never came: the attempt cannot be continued.
        """
        known = len(self.tokens) - position
        if known < 0:
            raise TransferFailed(f"output tokens {len(self.tokens)} to {position - 1} never arrived")
        if known:
            tokens, logprobs = tokens[known:], logprobs[known:]
        self.tokens.extend(tokens)
        return tokens, logprobs

    def check_complete(self, reported: int) -> None:
        """Raise `TransferFailed` if the worker emitted more tokens than arrived."""
        if reported > len(self.tokens):
            raise TransferFailed(f"the worker emitted {reported} output tokens, but {len(self.tokens)} arrived")


def finish_of(output: Sequence[int], stop: StopRules, eos_token_ids: Sequence[int]) -> FinishReason | None:
    """Return how `output` ends by itself, if it does: the worker died between last token and goodbye."""
    if not output:
        return None
    last = output[-1]
    ended = last in stop.stop_token_ids or (not stop.ignore_eos and last in eos_token_ids)
    if ended and len(output) >= max(1, stop.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= stop.max_tokens else None


def build_request(
    prompt: Prompt,
    *,
    request_id: RequestId,
    attempt: int,
    output: Output,
    page_hashes: tuple[PageHash, ...],
    timeout_s: float,
    num_cached_tokens: int,
    floors: Floors | None = None,
) -> GenerateRequest:
    """Return the request of one attempt: the prompt, what the client has of its answer, and what it came from."""
    request = GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        model=prompt.model,
        token_ids=(*prompt.token_ids, *output.tokens) if output.tokens else prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        sampling=prompt.sampling,
        stop=prompt.stop,
        page_hashes=page_hashes,
        timeout_s=timeout_s,
        priority=prompt.priority,
        tenant=prompt.tenant,
        cache_salt=prompt.cache_salt,
        num_cached_tokens=num_cached_tokens,
        mm_items=prompt.images,
        grammar=prompt.grammar,
        traceparent=current_traceparent.get(),
    )
    return with_floors(request, floors)
