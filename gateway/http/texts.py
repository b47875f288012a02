"""Routes that turn text into tokens and back, without asking the cluster: tokenizing, detokenizing, counting.

Knows no HTTP: a body's bytes in, an answer's bytes out.
"""

from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from core.errors import BadRequest
from gateway.http.conversation import read_chat
from gateway.http.intake import Intake, check_ids
from gateway.http.logprobs import token_string
from gateway.http.messages_body import CountBody, messages_chat
from gateway.http.schema import ChatBody, decode_body, peek_body
from gateway.http.sse import json_bytes
from gateway.text.tokenizer import Tokenizer

TextRoute = Callable[[bytes], Awaitable[bytes]]


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize with a plain prompt; with `messages` the body is that of a chat."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """POST /tokenize with a chat."""

    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class _Named(Struct, frozen=True):
    model: str = ""
    messages: object = None


class TextRoutes:
    """The handlers by path."""

    def __init__(self, intake: Intake, tokenizer: Tokenizer) -> None:
        self._intake = intake
        self._tokenizer = tokenizer

    def all(self) -> Mapping[str, TextRoute]:
        """Return every route; each raises what `core.errors` lists for a request."""
        return {
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
            "/v1/messages/count_tokens": self._count,
            "/v1/embeddings": self._embed,
        }

    async def _tokenize(self, raw: bytes) -> bytes:
        if peek_body(raw, _Named).messages is None:
            plain = decode_body(raw, TokenizeBody).body
            model = self._intake.find(plain.model or self._intake.default_model())
            add = plain.add_special_tokens is not False
            ids = await self._intake.off_loop(
                len(plain.prompt), lambda: self._tokenizer.encode_prompt(plain.prompt, add_special_tokens=add)
            )
            wants_strings = plain.return_token_strs
        else:
            chat = decode_body(raw, TokenizeChatBody).body
            model = self._intake.find(chat.model)
            ids = (await self._intake.render(read_chat(chat))).token_ids
            wants_strings = chat.return_token_strs
        vocabulary = self._tokenizer.vocabulary
        strings = [token_string(vocabulary, token) for token in ids] if wants_strings else None
        answer = {"count": len(ids), "max_model_len": model.max_tokens_total, "tokens": ids, "token_strs": strings}
        return json_bytes(answer)

    async def _detokenize(self, raw: bytes) -> bytes:
        body = decode_body(raw, DetokenizeBody).body
        model = self._intake.find(body.model or self._intake.default_model())
        check_ids(body.tokens, model.vocab_size, "tokens")
        text = await self._intake.off_loop(
            4 * len(body.tokens),
            lambda: self._tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens)),
        )
        return json_bytes({"prompt": text})

    async def _count(self, raw: bytes) -> bytes:
        body = decode_body(raw, CountBody).body
        self._intake.find(body.model)
        rendered = await self._intake.render(messages_chat(body))
        return json_bytes({"input_tokens": len(rendered.token_ids)})

    async def _embed(self, raw: bytes) -> bytes:
        model = self._intake.find(peek_body(raw, _Named).model)
        raise BadRequest(
            f"embeddings are not supported by the model `{model.name}`: it writes text; use /v1/chat/completions",
            param="model",
        )
