"""The APIs in which text is asked for: per route its body, how that becomes a request, and how the answer is written.

Knows no HTTP and no cluster.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic

from gateway.http.answer import AnswerFormat
from gateway.http.chat import ChatAnswer
from gateway.http.completions import CompletionAnswer
from gateway.http.conversation import chat_ask
from gateway.http.headers import RequestHints
from gateway.http.intake import Accepted, Intake
from gateway.http.messages_answer import MessagesAnswer
from gateway.http.messages_body import MessagesBody, messages_ask
from gateway.http.metrics import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from gateway.http.responses_answer import ResponsesAnswer
from gateway.http.responses_body import ResponsesBody, responses_ask
from gateway.http.schema import Body, BodyType, ChatBody, CompletionBody
from gateway.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyType]):
    """One generation route."""

    route: str
    kind: type[BodyType]
    accept: Callable[[BodyType, RequestHints], Awaitable[Accepted]]
    form: Callable[[Accepted, BodyType], AnswerFormat]


class Dialects:
    """The generation routes over one intake; `unix_time` fills the field `created`."""

    def __init__(self, intake: Intake, vocabulary: Vocabulary, unix_time: Callable[[], float]) -> None:
        self._intake = intake
        self._vocabulary = vocabulary
        self._unix_time = unix_time

    def all(self) -> tuple[Dialect[Any], ...]:
        """Return every route."""
        return (
            Dialect(CHAT, ChatBody, self._accept_chat, self._chat),
            Dialect(COMPLETIONS, CompletionBody, self._intake.accept_completion, self._completion),
            Dialect(RESPONSES, ResponsesBody, self._accept_response, self._response),
            Dialect(MESSAGES, MessagesBody, self._accept_message, self._message),
        )

    def _accept_chat(self, body: ChatBody, hints: RequestHints) -> Awaitable[Accepted]:
        return self._intake.accept_chat(chat_ask(body), hints)

    def _chat(self, accepted: Accepted, body: ChatBody) -> AnswerFormat:
        include_usage, continuous = _usage_options(body)
        return ChatAnswer(
            answer_id=accepted.request_id,
            model=accepted.model,
            created=int(self._unix_time()),
            num_choices=len(accepted.samples),
            vocabulary=self._vocabulary,
            include_usage=include_usage,
            continuous_usage=continuous,
            with_logprobs=accepted.with_logprobs,
            reasons=accepted.reasons,
        )

    def _completion(self, accepted: Accepted, body: CompletionBody) -> AnswerFormat:
        include_usage, continuous = _usage_options(body)
        return CompletionAnswer(
            answer_id=accepted.request_id,
            model=accepted.model,
            created=int(self._unix_time()),
            echoes=accepted.echoes,
            vocabulary=self._vocabulary,
            include_usage=include_usage,
            continuous_usage=continuous,
            with_logprobs=accepted.with_logprobs,
        )

    def _accept_response(self, body: ResponsesBody, hints: RequestHints) -> Awaitable[Accepted]:
        return self._intake.accept_chat(responses_ask(body), hints)

    def _response(self, accepted: Accepted, body: ResponsesBody) -> AnswerFormat:
        return ResponsesAnswer(
            body,
            answer_id=accepted.request_id,
            model=accepted.model,
            created=int(self._unix_time()),
            vocabulary=self._vocabulary,
            with_logprobs=accepted.with_logprobs,
        )

    def _accept_message(self, body: MessagesBody, hints: RequestHints) -> Awaitable[Accepted]:
        return self._intake.accept_chat(messages_ask(body), hints)

    def _message(self, accepted: Accepted, _body: MessagesBody) -> AnswerFormat:
        return MessagesAnswer(answer_id=accepted.request_id, model=accepted.model)


def _usage_options(body: Body) -> tuple[bool, bool]:
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage or options.continuous_usage_stats), bool(options.continuous_usage_stats)
