"""What one delta of tokens adds for the client: text, reasoning, tool calls, and the end.

Plain values between the readers of an answer (`gateway.text`) and its writers (`gateway.http`).
"""

import msgspec

from core.handover import TokenLogprobs
from core.request import FinishReason


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    """More of one tool call. The first delta of a call has `id` and `name`; `arguments` are fragments of a JSON text."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one delta adds. A msgspec struct because one is made per token.

    Within a piece, and over all pieces of an answer, reasoning comes before text and text before tool calls.
    """

    text: str
    num_tokens: int
    """Output tokens that this piece counts (0 for text released by the end)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    """How many of `num_tokens` belong to the reasoning, its closing mark included."""
    reasoning_logprobs: tuple[TokenLogprobs, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    is_calling: bool = False
    """With `finish`: the answer ends in tool calls."""
    matched_stop: str | None = None
    """With `finish`: the stop string that ended the answer."""

    @property
    def ending(self) -> str | None:
        """The finish reason as clients are told it."""
        if self.finish is None:
            return None
        return "tool_calls" if self.is_calling and self.finish is FinishReason.STOP else self.finish.value
