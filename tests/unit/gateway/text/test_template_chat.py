"""Chats with template models: tools and earlier calls in prompts, reasoning and calls out of answers."""

import json

import pytest

from core.errors import BadRequest
from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.chat import Chat, TextRules
from gateway.text.piece import Piece
from gateway.text.template_chat import AnswerParsing, TemplateChat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.deepseek import WEATHER
from tests.fakes.generator import fake_logprob
from tests.fakes.tokenizer import CHAT_TEMPLATE, build_tokenizer

TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> in <tool_call></tool_call>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUESTION = {"role": "user", "content": "Weather?"}
OBJECT = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tools"), template=TOOLS_TEMPLATE)


def text_of(tokenizer: Tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special=False)


def read(form: TemplateChat, tokenizer: Tokenizer, chat: Chat, text: str, *, chunk: int = 1, **rules) -> Piece:
    """The whole answer as one piece, and a check that nothing comes twice."""
    answer = form.render(chat).open_answer(TextRules(silent=frozenset({2}), call_prefix="c", **rules))
    ids = (*tokenizer.encode_prompt(text), 2)
    parts = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
    pieces: list[Piece] = []
    for number, part in enumerate(parts, start=1):
        finish = FinishReason.STOP if number == len(parts) else None
        logprobs = tuple(fake_logprob(token, 0) for token in part)
        pieces.append(answer.push(Delta(token_ids=part, logprobs=logprobs, finish=finish)))
        if pieces[-1].finish is not None:
            break
    calls: dict[int, list[str]] = {}
    for call in [call for piece in pieces for call in piece.calls]:
        known = calls.setdefault(call.index, ["", "", ""])
        for at, value in enumerate((call.id, call.name, call.arguments)):
            known[at] += value
    last = pieces[-1]
    return Piece(
        "".join(piece.text for piece in pieces),
        sum(piece.num_tokens for piece in pieces),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        last.finish,
        "".join(piece.reasoning for piece in pieces),
        sum(piece.reasoning_tokens for piece in pieces),
        tuple(entry for piece in pieces for entry in piece.reasoning_logprobs),
        tuple(map(tuple, calls.values())),
        last.is_calling,
        last.matched_stop,
    )


def test_tools_and_earlier_calls_are_written_by_the_template(tokenizer: Tokenizer):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    rendered = TemplateChat(tokenizer).render(Chat(messages=messages, tools=[WEATHER]))
    text = text_of(tokenizer, rendered.token_ids)
    assert json.dumps(WEATHER) in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text


def test_a_special_token_in_a_tool_is_text(tokenizer: Tokenizer):
    evil = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    rendered = TemplateChat(tokenizer).render(Chat(messages=[QUESTION], tools=[evil]))
    assert rendered.token_ids.count(2) == 1


def test_without_a_choice_of_tools_none_are_offered(tokenizer: Tokenizer):
    rendered = TemplateChat(tokenizer).render(Chat(messages=[QUESTION], tools=[WEATHER], tool_choice="none"))
    assert "<tools>" not in text_of(tokenizer, rendered.token_ids)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_an_answer_is_read_into_reasoning_text_and_calls(tokenizer: Tokenizer, chunk: int):
    written = f"<think>\nHm 好.\n</think>\n\nI look. <tool_call>\n{OBJECT}\n</tool_call>"
    piece = read(TemplateChat(tokenizer), tokenizer, Chat(messages=[QUESTION], tools=[WEATHER]), written, chunk=chunk)
    assert (piece.reasoning, piece.text, piece.ending) == ("Hm 好.", "I look.", "tool_calls")
    assert piece.calls == (("c0", "get_weather", '{"city": "Paris", "days": 3}'),)
    num_tokens = len(tokenizer.encode_prompt(written)) + 1
    assert piece.num_tokens == num_tokens == len(piece.logprobs) + len(piece.reasoning_logprobs)
    assert 0 < piece.reasoning_tokens == len(piece.reasoning_logprobs) < num_tokens


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_stop_string_ends_the_text_and_not_the_reasoning(tokenizer: Tokenizer, chunk: int):
    written = "<think>the end</think>Hello, the end of it"
    form, chat = TemplateChat(tokenizer), Chat(messages=[QUESTION])
    piece = read(form, tokenizer, chat, written, chunk=chunk, stops=("the e",))
    assert (piece.reasoning, piece.text, piece.matched_stop) == ("the end", "Hello, ", "the e")
    assert piece.num_tokens == read(form, tokenizer, chat, written, stops=("the e",)).num_tokens


def test_thinking_switched_off_is_no_reasoning(tokenizer: Tokenizer):
    form = TemplateChat(tokenizer)
    assert form.ignored_fields == {"reasoning_effort"}
    rendered = form.render(Chat(messages=[QUESTION], thinking=False))
    assert text_of(tokenizer, rendered.token_ids).endswith("</think>\n\n")
    assert not rendered.reasons
    assert read(form, tokenizer, Chat(messages=[QUESTION], thinking=False), "<think>x").text == "<think>x"


def test_an_answer_of_space_only_comes_out_at_its_end(tokenizer: Tokenizer):
    piece = read(TemplateChat(tokenizer), tokenizer, Chat(messages=[QUESTION]), " \n")
    assert (piece.text, piece.reasoning, piece.num_tokens) == (" \n", "", len(tokenizer.encode_prompt(" \n")) + 1)


def test_parsing_can_be_named_or_switched_off(tokenizer: Tokenizer):
    off = TemplateChat(tokenizer, AnswerParsing(tool_calls="none", reasoning="none"))
    assert not off.render(Chat(messages=[QUESTION])).reasons
    with pytest.raises(BadRequest, match="no tool calls"):
        off.render(Chat(messages=[QUESTION], tools=[WEATHER]))
    named = TemplateChat(tokenizer, AnswerParsing(tool_calls="pythonic"))
    piece = read(named, tokenizer, Chat(messages=[QUESTION], tools=[WEATHER]), "[get_weather(city='Rome')]")
    assert piece.calls == (("c0", "get_weather", '{"city": "Rome"}'),)


@pytest.mark.parametrize("ask", [{"continues": True}, {}])
def test_the_last_message_of_the_assistant_is_continued(tokenizer: Tokenizer, ask: dict):
    begun = {"role": "assistant", "content": "The answer <|im_end|> is ", **({} if ask else {"prefix": True})}
    rendered = TemplateChat(tokenizer).render(Chat(messages=[QUESTION, begun], **ask))
    assert text_of(tokenizer, rendered.token_ids).endswith("<|im_start|>assistant\nThe answer <|im_end|> is ")
    assert rendered.token_ids.count(2) == 1, "what the user wrote is no end of a message"


def test_only_what_the_assistant_began_is_continued(tokenizer: Tokenizer):
    with pytest.raises(BadRequest, match="assistant"):
        TemplateChat(tokenizer).render(Chat(messages=[QUESTION], continues=True))


def test_a_template_without_tools_refuses_them(tmp_path):
    form = TemplateChat(build_tokenizer(tmp_path, template=CHAT_TEMPLATE))
    assert form.ignored_fields == {"thinking", "reasoning_effort"}
    with pytest.raises(BadRequest) as error:
        form.render(Chat(messages=[QUESTION], tools=[WEATHER]))
    assert error.value.param == "tools"


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (Chat(messages=[QUESTION], tools=[WEATHER], tool_choice="sometimes"), "tool_choice"),
        (Chat(messages=[QUESTION], tools=[{"type": "function"}]), "tools[0].function.name"),
        (
            Chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(tokenizer: Tokenizer, chat: Chat, param: str):
    with pytest.raises(BadRequest) as error:
        TemplateChat(tokenizer).render(chat)
    assert error.value.param == param
