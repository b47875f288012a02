"""Chats with DeepSeek-V4 and V4.1: written as the published `deepseek_recipe` package writes them.

It converts and renders; here is what it leaves to its caller: fields that it drops, plain errors, tokens with a cache,
images as placeholders and pixels. How answers are read is `gateway.text.deepseek_answer`'s.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import deepseek_recipe as recipe
import msgspec

from core.errors import BadRequest, ConfigError
from core.image_plan import ImageRules
from core.request import MmItem
from gateway.text.chat import AnswerText, Chat, ImagePart, TextRules
from gateway.text.deepseek_answer import DeepseekAnswer, Marks
from gateway.text.grammar import AnswerGrammar, thought_rules
from gateway.text.grammar_calls import DsmlCallGrammar, chat_grammar
from gateway.text.images import ImageLimits, load_image
from gateway.text.segments import SegmentEncoder, split_ranges
from gateway.text.tokenizer import Tokenizer

Version = Literal["deepseek-v4", "deepseek-v4.1"]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "latest_reminder"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_ENCODINGS = {"deepseek-v4": recipe.DeepseekV4Encoding, "deepseek-v4.1": recipe.DeepseekV41Encoding}
_VERSIONS = {"deepseek-v4": recipe.ModelVersion.DeepseekV4Pro, "deepseek-v4.1": recipe.ModelVersion.DeepseekV41Flash}
_MODEL = "served"
_Kind = recipe.SpecialToken
_NEEDED = {
    "deepseek-v4": (_Kind.Bos, _Kind.Eos, _Kind.User, _Kind.Assistant, _Kind.ThinkingStart, _Kind.ThinkingEnd),
    "deepseek-v4.1": (
        *(_Kind.Bos, _Kind.Eos, _Kind.System, _Kind.User, _Kind.Assistant),
        *(_Kind.ThinkingStart, _Kind.ThinkingEnd),
    ),
}
_CALLS = {"deepseek-v4": ("", "tool_calls"), "deepseek-v4.1": (" ", "calls")}
"""What stands behind the mark in every tag of calls, and the name of the outermost one."""
_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """What a model with an image encoder needs in its prompts."""

    rules: ImageRules
    limits: ImageLimits
    token_id: int
    """The id at every position of an image, as the model's config names it."""


class _Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `RenderedChat`."""

    token_ids: tuple[int, ...]
    images: tuple[MmItem, ...]
    reasons: bool
    marks: Marks
    grammar: AnswerGrammar | None
    request: recipe.ConversationRequest
    tokenizer: Tokenizer

    def open_answer(self, rules: TextRules) -> AnswerText:
        generator = recipe.ChatCompletionRequest.chunk_generator(self.request, "", "")
        processor = recipe.StreamProcessor(generator, self.request.parsing_options)
        stage = self.request.parsing_options.thinking_initial_stage
        return DeepseekAnswer(
            self.tokenizer.vocabulary,
            processor,
            self.marks,
            rules,
            starts_in_reasoning=stage is not None and stage.starts_in_reasoning(),
        )


class DeepseekChat:
    """Implements `ChatFormat` for one of the two prompt formats."""

    def __init__(
        self,
        version: Version,
        tokenizer: Tokenizer,
        segments: SegmentEncoder,
        *,
        vision: Vision | None = None,
        thinks: bool = True,
    ) -> None:
        """`thinks`: what a request that does not say gets. Raises `ConfigError` if the tokenizer lacks special tokens."""
        self._encoding = _ENCODINGS[version]()
        self._options = recipe.ConversionOptions(default_thinking_mode=thinks).with_model_versions_by_name(
            {_MODEL: _VERSIONS[version]}
        )
        self._tokenizer = tokenizer
        self._segments = segments
        self._vision = vision
        self._image_mark = _Kind.Image.default_str()
        added = tokenizer.added_tokens
        missing = [kind.default_str() for kind in _NEEDED[version] if kind.default_str() not in added]
        if missing:
            raise ConfigError(f"tokenizer.json lacks special tokens of {version}: {', '.join(missing)}")
        self._specials = added
        mark = added.get(_Kind.Dsml.default_str())
        gap, block = _CALLS[version]
        self._calls = None if mark is None else DsmlCallGrammar(mark, gap=gap, block=block)
        names = (_Kind.ThinkingStart, _Kind.ThinkingEnd, _Kind.Dsml)
        self._marks = Marks(
            think_end=added[_Kind.ThinkingEnd.default_str()],
            call=added.get(_Kind.Dsml.default_str()),
            shown=frozenset(added[kind.default_str()] for kind in names if kind.default_str() in added),
        )
        self._marks_without_calls = replace(self._marks, call=None)
        self._thought = thought_rules((self._marks.think_end,))

    @property
    def ignored_fields(self) -> frozenset[str]:
        return frozenset()

    def render(self, chat: Chat) -> _Rendered:
        self._check(chat)
        request = self._convert(self._body(chat))
        is_forced = chat.tool_choice not in (None, "none", "auto")
        if is_forced and not request.conversation.thinking_mode:
            # Without reasoning the prompt itself begins the calls; behind reasoning only the grammar can ask for them.
            request = self._convert({**self._body(chat), "tool_choice": chat.tool_choice})
        prompt = self._encoding.render_conversation(request.conversation)
        images = self._load(chat.images, prompt.image_sources)
        ids, placed = self._encode(prompt, images)
        return _Rendered(
            token_ids=ids,
            images=placed,
            reasons=request.conversation.thinking_mode,
            marks=self._marks if request.parsing_options.parse_tool_calls else self._marks_without_calls,
            grammar=self._grammar(chat, request),
            request=request,
            tokenizer=self._tokenizer,
        )

    def _grammar(self, chat: Chat, request: recipe.ConversationRequest) -> AnswerGrammar | None:
        stage = request.parsing_options.thinking_initial_stage
        reasons = stage is not None and stage.starts_in_reasoning()
        return chat_grammar(
            chat.tools,
            chat.tool_choice,
            chat.shape,
            self._calls,
            thought=self._thought if reasons else (),
            lead=r"\n{0,2}",
            is_begun=not request.conversation.thinking_mode,
        )

    def _check(self, chat: Chat) -> None:
        for index, message in enumerate(chat.messages):
            if message["role"] not in ROLES:
                where = f"messages[{index}].role"
                raise BadRequest(f"`{where}` must be one of {', '.join(sorted(ROLES))}", param=where)
        if chat.continues and chat.messages[-1]["role"] != "assistant":
            raise BadRequest("only a message of the assistant can be continued", param="continue_final_message")
        if not chat.add_generation_prompt and not chat.continues:
            raise BadRequest(
                "this model's chats always end where the assistant speaks; leave `add_generation_prompt` out",
                param="add_generation_prompt",
            )
        if chat.tools and _Kind.Dsml.default_str() not in self._specials:
            raise BadRequest("this model's tokenizer has no token for tool calls; leave `tools` out", param="tools")
        if chat.images and self._vision is None:
            raise BadRequest(f"`{chat.images[0].where}`: this model takes no images", param=chat.images[0].where)
        if self._vision is not None and len(chat.images) > self._vision.limits.max_images:
            raise BadRequest(f"at most {self._vision.limits.max_images} images are taken", param="messages")

    def _body(self, chat: Chat) -> dict[str, Any]:
        """Return the chat as a request of the package: only what it is to look at."""
        thinking, effort = _mode(chat)
        messages = [_message(message) for message in chat.messages]
        if chat.continues:
            messages[-1]["prefix"] = True
        body: dict[str, Any] = {"model": _MODEL, "messages": messages}
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if effort is not None:
            body["reasoning_effort"] = effort
        if chat.tools:
            body["tools"] = list(chat.tools)
        if chat.tool_choice in ("none", "auto"):
            body["tool_choice"] = chat.tool_choice
        return body

    def _convert(self, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(body).convert(self._options)
        except recipe.ConversionError as error:
            raise _explain(error) from error
        except (ValueError, OverflowError, RecursionError) as error:
            # Of JSON that it does not take: other fields, numbers beyond its range, deep nesting.
            raise BadRequest(str(error), param="messages") from error

    def _load(self, parts: Sequence[ImagePart], sources: Sequence[recipe.ImageSource]) -> list[MmItem]:
        """Return the images in the order of their placeholders."""
        if self._vision is None:
            return []
        loaded: list[MmItem] = []
        room = self._vision.limits.max_bytes
        for source in sources:
            part = parts[_index_of(source)]
            item = load_image(part, self._vision.rules, self._vision.limits)
            room -= len(item.pixels)
            if room < 0:
                raise BadRequest(
                    f"the images hold more than {self._vision.limits.max_bytes} bytes as the model sees them; "
                    "send fewer or smaller ones",
                    param=part.where,
                )
            loaded.append(item)
        return loaded

    def _encode(
        self, prompt: recipe.RenderedPrompt, images: Sequence[MmItem]
    ) -> tuple[tuple[int, ...], tuple[MmItem, ...]]:
        """Return the prompt's ids, each image's placeholder widened to its place, and the images put there."""
        ids: list[int] = []
        placed: list[MmItem] = []
        for text, is_special in split_ranges(prompt.prompt, prompt.special_ranges):
            if not is_special:
                ids.extend(self._segments.encode(text))
            elif text == self._image_mark and self._vision is not None:
                item = images[len(placed)]
                placed.append(msgspec.structs.replace(item, start=len(ids), end=len(ids) + item.end))
                ids.extend([self._vision.token_id] * item.end)
            else:
                ids.append(self._special_id(text))
        assert len(placed) == len(images), "a placeholder for each image"
        return tuple(ids), tuple(placed)

    def _special_id(self, text: str) -> int:
        index = self._specials.get(text)
        if index is None:
            raise BadRequest(f"this model's tokenizer has no token {text}", param="messages")
        return index


def _mode(chat: Chat) -> tuple[bool | None, str | None]:
    """Return (thinking, effort): from the fields of their own, else from `chat_template_kwargs`."""
    thinking, effort = chat.thinking, chat.effort
    for name, value in chat.variables.items():
        where = f"chat_template_kwargs.{name}"
        if name in ("thinking", "enable_thinking") and isinstance(value, bool):
            thinking = value if thinking is None else thinking
        elif name == "reasoning_effort" and isinstance(value, str):
            effort = effort or value
        else:
            raise BadRequest(
                f"`{where}`: this model's chats take thinking (true or false) and reasoning_effort", param=where
            )
    if effort is not None and effort not in _EFFORTS:
        raise BadRequest(f"`reasoning_effort` must be one of {', '.join(sorted(_EFFORTS))}", param="reasoning_effort")
    if effort == "none" and thinking:
        raise BadRequest("`reasoning_effort` none and thinking exclude each other", param="reasoning_effort")
    return thinking, effort


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_part(part) for part in content]
    role = "system" if message["role"] == "developer" else message["role"]
    return {
        "role": role,
        "content": content,
        **{name: message[name] for name in _FIELDS if message.get(name) is not None},
    }


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    # The package only passes images on: it gets the number in place of megabytes of picture.
    number = base64.b64encode(int(part["image"]).to_bytes(3)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}


def _index_of(source: recipe.ImageSource) -> int:
    assert source.data_url is not None
    return int.from_bytes(base64.b64decode(source.data_url.rpartition(",")[2]))


class _Fault(msgspec.Struct):
    message: str = "the messages cannot be converted"
    param: str | None = None


class _Body(msgspec.Struct):
    error: _Fault


def _explain(error: recipe.ConversionError) -> BadRequest:
    try:
        fault = msgspec.json.decode(error.body, type=_Body).error
    except msgspec.DecodeError:
        fault = _Fault()
    return BadRequest(fault.message, param=fault.param or "messages")
