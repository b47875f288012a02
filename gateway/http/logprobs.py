"""Log-probability entries as the two OpenAI routes spell them. Knows token bytes, no sampling."""

from collections.abc import Sequence
from typing import Any

from core.handover import TokenLogprobs
from gateway.text.vocabulary import Vocabulary

_FLOOR = -9999.0
"""Written for minus infinity, which JSON cannot say (OpenAI's convention)."""


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)


def token_string(vocabulary: Vocabulary, token: int) -> str:
    """Return a token's own text; bytes that are no whole character show as U+FFFD."""
    return vocabulary.bytes_of(token).decode(errors="replace")


def chat_entries(vocabulary: Vocabulary, items: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return `logprobs.content` of a chat choice: one entry per output token."""
    return [
        {
            **_chat_entry(vocabulary, item.token, item.logprob),
            "top_logprobs": [_chat_entry(vocabulary, token, logprob) for token, logprob in item.top],
        }
        for item in items
    ]


def _chat_entry(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_string(vocabulary, token),
        "logprob": _number(logprob),
        "bytes": list(vocabulary.bytes_of(token)),
    }


def completion_entries(
    vocabulary: Vocabulary, items: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of a completion choice and the offset after it.

    Offsets count characters of the tokens' own texts from the first output token on.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    for item in items:
        text = token_string(vocabulary, item.token)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        for token, logprob in (*item.top, (item.token, item.logprob)):
            top.setdefault(token_string(vocabulary, token), _number(logprob))
        tops.append(top)
    logprobs = [_number(item.logprob) for item in items]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset
