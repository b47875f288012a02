"""A chat as the formats of models take it, what they make of it, and how they read the answer.

Two formats exist: the chat template of a model directory, and DeepSeek's. Knows no HTTP and no tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from core.request import MmItem
from gateway.generation import Delta
from gateway.text.grammar import AnswerGrammar, Shape
from gateway.text.piece import Piece


class ImagePart(msgspec.Struct, frozen=True):
    """An image as the client sent it. Parts of a message's content refer to it as ``{"type": "image", "image": i}``."""

    url: str
    """A data: URL."""
    detail: str
    """low | high | auto | original"""
    where: str
    """The field's path, for errors."""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation to be continued. Roles and shapes are checked, what a format understands is not."""

    messages: Sequence[Mapping[str, Any]]
    """With `role`, `content` (a text, or parts of type text and image) and what else the client sent of
    `name`, `tool_call_id`, `tool_calls`, `reasoning_content` and `prefix`."""
    images: tuple[ImagePart, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    """Function tools in OpenAI's shape."""
    tool_choice: str | Mapping[str, Any] | None = None
    thinking: bool | None = None
    """None: the format's own default."""
    effort: str | None = None
    add_generation_prompt: bool = True
    continues: bool = False
    """The answer continues the last message, which is the assistant's."""
    shape: Shape | None = None
    """What the text of the answer must look like."""
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The request's own arguments for the format (`chat_template_kwargs`)."""


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """How one sample's tokens become visible text."""

    stops: tuple[str, ...] = ()
    """Stop strings; looked for in the answer, not in reasoning or tool calls."""
    silent: frozenset[int] = frozenset()
    """Ids that never show: end-of-text, stop ids."""
    min_tokens: int = 0
    skip_special: bool = True
    call_prefix: str = ""
    """Begins the id of every tool call; unique to the sample."""


class AnswerText(Protocol):
    """Reads one sample: deltas of token ids in, pieces out. The sum of pieces does not depend on how deltas are cut."""

    @property
    def num_surplus(self) -> int:
        """Tokens received after a stop string had completed."""
        ...

    def push(self, delta: Delta) -> Piece:
        """Take one delta; nothing may be pushed after the piece with `finish`, which comes with the last delta or before."""
        ...


class RenderedChat(Protocol):
    """A chat as a prompt, and the way to read its answers."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        ...

    @property
    def images(self) -> tuple[MmItem, ...]:
        """The prompt's images by position, with pixels."""
        ...

    @property
    def grammar(self) -> AnswerGrammar | None:
        """What the whole answer must look like, reasoning and calls included; None: it is free."""
        ...

    @property
    def reasons(self) -> bool:
        """The answer may begin with reasoning, which is told apart."""
        ...

    def open_answer(self, rules: TextRules) -> AnswerText:
        """Return a fresh reader for one sample."""
        ...


class ChatFormat(Protocol):
    """How chats with one model are written and read. Immutable; `render` may be called from several threads."""

    @property
    def ignored_fields(self) -> frozenset[str]:
        """Body fields that have no meaning for this model."""
        ...

    def render(self, chat: Chat) -> RenderedChat:
        """Return the prompt; raises `BadRequest` for what the model cannot do, with the field's name."""
        ...
