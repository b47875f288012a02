"""When a request ends: its length bound, the ids that stop it, and the verdict on a token. Facts of a request, no state."""

from core.request import FinishReason, GenerateRequest
from engine.config import TokenFacts


class Limits:
    """Ends of requests under one model."""

    def __init__(self, facts: TokenFacts) -> None:
        self._facts = facts

    def max_len(self, request: GenerateRequest) -> int:
        """Return the bound on prompt + output tokens."""
        return min(request.num_prompt_tokens + request.stop.max_tokens, self._facts.max_positions)

    def stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids that end the request."""
        ends = () if request.stop.ignore_eos else self._facts.eos_token_ids
        return tuple(dict.fromkeys((*ends, *request.stop.stop_token_ids)))

    def masked_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids that must not be chosen before the minimum length."""
        return tuple(dict.fromkeys((*self._facts.eos_token_ids, *request.stop.stop_token_ids)))

    def finish_after(self, request: GenerateRequest, num_tokens: int, last: int) -> FinishReason | None:
        """Return why a sequence of `num_tokens` tokens that ends in `last`, an output, is over; None if it goes on."""
        if last in self.stop_ids(request) and num_tokens - request.num_prompt_tokens > request.stop.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_len(request) else None
