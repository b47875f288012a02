"""Request fields outside the schema: those that ask for nothing, and those that ask for what cannot be done yet.

Knows names and values only; what is in neither table is ignored and reported.
"""

from collections.abc import Callable, Mapping
from typing import Any

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Accepted without a word: they ask for nothing that shows in the answer."""


def _is_empty(value: Any) -> bool:
    return value is None or value in (False, "", [], {})


def _is_text(value: Any) -> bool:
    return not isinstance(value, dict)


def _is_free_choice(value: Any) -> bool:
    return value in (None, "none", "auto")


def _is_text_only(value: Any) -> bool:
    return value in (None, [], ["text"])


REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_is_empty, "tool calls belong to chats"),
    "functions": (_is_empty, "this form of tool calls is not supported; send `tools` in a chat"),
    "tool_choice": (_is_free_choice, "tool calls belong to chats"),
    "function_call": (_is_free_choice, "this form of tool calls is not supported; send `tool_choice` in a chat"),
    "store": (_is_empty, "responses are not stored here"),
    "background": (_is_empty, "background responses are not supported"),
    "previous_response_id": (_is_empty, "responses are not stored here"),
    "conversation": (_is_empty, "conversations are not stored here"),
    "prompt": (_is_text, "prompts are not stored here"),
    "modalities": (_is_text_only, "only text comes out"),
    "audio": (_is_empty, "only text comes out"),
    "web_search_options": (_is_empty, "web search is not supported"),
    **dict.fromkeys(
        ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
        (lambda value: value is None, "workers and transfers are chosen here, not by clients"),
    ),
    "lora": (_is_empty, "LoRA adapters are not supported"),
    "lora_path": (_is_empty, "LoRA adapters are not supported"),
    "prompt_logprobs": (_is_empty, "log-probabilities of the prompt are not supported yet"),
    "prompt_embeds": (_is_empty, "prompts as embeddings are not supported"),
    "use_beam_search": (_is_empty, "beam search is not supported"),
}
"""Fields that change the answer in a way this server cannot: name -> (values that ask for nothing, reason)."""
