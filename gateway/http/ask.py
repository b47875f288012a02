"""What a generation route asks of the cluster, whichever API it came through: what `gateway.http.intake` takes."""

import msgspec

from gateway.http.schema import Body
from gateway.text.chat import Chat


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request but for its prompt."""

    prefix: str
    """Begins the request's id."""
    body: Body
    """Sampling, stop rules, and how the answer travels."""
    max_tokens: int | None
    """None: `default_tokens`, or all the room there is."""
    default_tokens: int | None = None
    num_logprobs: int = -1
    """As in `core.request.SamplingParams`."""
    prompt_field: str = "messages"
    max_tokens_field: str = "max_tokens"
    format_field: str = "response_format"
    """What the three are called in this API, for errors."""
    ignored: tuple[str, ...] = ()
    """Parts of the body that were accepted without effect."""


class ChatAsk(Ask, frozen=True, kw_only=True):
    """A conversation to be continued."""

    chat: Chat
