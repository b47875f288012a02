"""Streaming conformance over random texts, tokens and cuts, in all APIs and both kinds of chat formats.

A stream adds up to the whole answer, has one end, and counts what the engine made (`tests.fakes.streams` checks each
event). The oracle of plain text is decoding everything at once.
"""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.request import FinishReason
from gateway.generation import Delta, Prompt, ServedModel
from gateway.http import answer as answer_module
from gateway.http import messages_answer, responses_answer, sse
from gateway.text import stop, thinking
from gateway.text.calls import parser
from gateway.text.template_chat import TemplateChat
from tests.fakes.asgi import post
from tests.fakes.deepseek import CALL_TEXT, SERVED, WEATHER, load_chat, spell, write_directory
from tests.fakes.generator import ScriptedGenerator, fake_logprob
from tests.fakes.http_api import CHAT, COMPLETIONS, build_api
from tests.fakes.streams import CHAT_ROUTES, STREAM, Told, body_of, read_stream, read_whole, stops_of, tools_of
from tests.fakes.tokenizer import build_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{# answers with <think></think> and <tool_call></tool_call> #}"
)
WORDS = [
    *("a", "word ", "\n", "\n\n", " ", "é", "e\u0301", "好", "🌍", "👨‍👩‍👧", "\u2028", "\u0085", "\x00", "\ufffd", '"', "\\"),
    *("<think>", "</think>", "<thi", "</th", "<|im_end|>", "<|im_start|>", "<｜User｜>", "｜DSML｜", "stop", "st", "op"),
    *("<tool_call>", "</tool_call>", '{"name": "get_weather", "arguments": {"city": "好"}}', '{"name"', "}", "<", "｜"),
    *(CALL_TEXT, CALL_TEXT[:40], CALL_TEXT[40:], "\n\n<｜DSML｜ calls>", "</｜DSML｜ calls>", "<｜DSML｜ invoke", "[DONE]"),
    *("data: ", "event: ping\n\n", "data: [DONE]\n\n"),
]  # fmt: skip
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "好", "days": [1, "<"]}}\n</tool_call>'
FORMATS = ("template", "deepseek")


class Rig:
    """One application per format; what its workers say next, and in what pieces, is set from outside."""

    def __init__(self, directory) -> None:
        plain = build_tokenizer(directory / "template", template=TEMPLATE)
        (directory / "deepseek").mkdir()
        deepseek, form = load_chat(write_directory(directory / "deepseek"))
        served = ServedModel(name="tiny", max_tokens_total=8192, vocab_size=400, eos_token_ids=(2,))
        self.tokenizers = {"template": plain, "deepseek": deepseek}
        self.apis = {
            "template": build_api(ScriptedGenerator(self._script, (served,)), plain, chat_format=TemplateChat(plain)),
            "deepseek": build_api(ScriptedGenerator(self._script, (SERVED,)), deepseek, chat_format=form),
        }
        self.said: Sequence[int] = ()
        self.sizes: Sequence[int] = ()
        self.finish = FinishReason.STOP

    def _script(self, prompt: Prompt) -> list[Delta]:
        """The tokens in pieces of the given sizes; a last piece of size 0 tells the end alone."""
        deltas: list[Delta] = []
        at = 0
        for size in self.sizes:
            ids = tuple(self.said[at : at + size])
            at += size
            logprobs = tuple(fake_logprob(token, 0) for token in ids) if prompt.sampling.num_logprobs >= 0 else ()
            finish = self.finish if len(deltas) == len(self.sizes) - 1 else None
            deltas.append(
                Delta(token_ids=ids, logprobs=logprobs, finish=finish, num_cached_tokens=None if deltas else 1)
            )
        return deltas

    def ask(self, name: str, route: str, payload: dict):
        call = asyncio.run(post(route, payload).run(self.apis[name][0]))
        assert call.status == 200, call.text
        return call

    def whole_and_stream(self, name: str, route: str, payload: dict, cuts: Sequence[int]) -> tuple[Told, Told]:
        """The answer in one piece, and the stream of its pieces."""
        self.sizes = [len(self.said)]
        whole = read_whole(route, self.ask(name, route, payload).json)
        self.sizes = cuts
        return whole, read_stream(route, self.ask(name, route, {**payload, **STREAM}).text)


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[str], list[int], list[int], FinishReason]:
    """(format, words, raw ids, sizes of pieces as shares, finish)."""
    words = draw(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=8))
    # A frame that makes sense around words that need not: without it hardly any answer has a call.
    words = [draw(st.sampled_from(["", "<think>", "hm</think>", "<think>hm</think>\n"])), *words]
    words += [draw(st.sampled_from(["", CALL_TEXT, HERMES, f"{HERMES}\n{HERMES} done", f"\n\n{CALL_TEXT}\n"]))]
    raw = draw(st.lists(st.integers(3, 390), max_size=3))
    shares = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    return draw(st.sampled_from(FORMATS)), words, raw, shares, finish


def prepare(
    rig: Rig, name: str, words: list[str], raw: list[int], shares: list[int], finish: FinishReason
) -> list[int]:
    """Set what is said; return the sizes of its pieces."""
    text = "".join(words).encode(errors="replace").decode()
    tokenizer = rig.tokenizers[name]
    ids = spell(tokenizer, text) if name == "deepseek" else list(tokenizer.encode_prompt(text))
    ends = {"template": [2], "deepseek": [1]}[name] if finish is FinishReason.STOP else []
    rig.said, rig.finish = [*ids, *raw, *ends], finish
    sizes: list[int] = []
    while sum(sizes) < len(rig.said):
        sizes.append(min(shares[len(sizes) % len(shares)], len(rig.said) - sum(sizes)))
    return sizes if sizes and shares[0] % 2 else [*sizes, 0]


LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
ROUNDS = 250
"""Each asks 6 answers of 3 APIs (or 2 of one): with what `make long` runs, thousands of texts."""


def check_chats(rig: Rig, answer, *, tools: bool, stops: bool) -> None:
    name, *rest = answer
    cuts = prepare(rig, name, *rest)
    told: dict[tuple[str, str], tuple] = {}
    for route in CHAT_ROUTES:
        payload = body_of(route, **(tools_of(route, WEATHER) if tools else {}))
        payload |= stops_of(route, ["stop", "e\u0301"]) if stops else {}
        payload |= {"logprobs": True} if route == CHAT else {}
        whole, stream = rig.whole_and_stream(name, route, payload, cuts)
        told[route, "whole"], told[route, "stream"] = whole.comparable(), stream.comparable()
        if route == CHAT:
            assert whole.logprobs == stream.logprobs
            assert len(whole.logprobs) == whole.usage[2]
        if stops:
            assert "stop" not in whole.text
        else:
            assert whole.usage[2] == len(rig.said)
    assert len({str(value) for value in told.values()}) == 1, told


@given(answers(), st.booleans(), st.booleans())
@settings(LIMITS, max_examples=ROUNDS)
def test_chats_tell_the_same_in_every_api_whole_and_streamed(rig: Rig, answer, tools: bool, stops: bool):
    check_chats(rig, answer, tools=tools, stops=stops)


def check_completion(rig: Rig, answer, *, stops: list[str]) -> None:
    name, *rest = answer
    cuts = prepare(rig, name, *rest)
    payload = body_of(COMPLETIONS, logprobs=0, **({"stop": stops} if stops else {}))
    whole, stream = rig.whole_and_stream(name, COMPLETIONS, payload, cuts)
    assert whole.comparable() == stream.comparable()
    assert whole.logprobs == stream.logprobs
    tokenizer = rig.tokenizers[name]
    silent = {1, 2}
    text = tokenizer.decode([token for token in rig.said if token not in silent])
    ends = [(text.find(mark) + len(mark), text.find(mark)) for mark in stops if mark in text]
    assert whole.text == (text[: min(ends)[1]] if ends else text)
    assert len(whole.logprobs) == whole.usage[2] <= len(rig.said)
    if not ends:
        assert whole.usage[2] == len(rig.said)


@given(answers(), st.sampled_from([[], ["stop"], ["好", "\ufffd"], ["op", "stop", "t"]]))
@settings(LIMITS, max_examples=ROUNDS)
def test_a_completion_is_the_decoded_whole_up_to_a_stop_string(rig: Rig, answer, stops: list[str]):
    check_completion(rig, answer, stops=stops)


@pytest.mark.long
@given(answers(), st.booleans(), st.booleans())
@settings(LIMITS, max_examples=5000)
def test_thousands_of_chats(rig: Rig, answer, tools: bool, stops: bool):
    check_chats(rig, answer, tools=tools, stops=stops)


MUTANTS = [
    (stop.StopScanner, "_holdback", lambda *_: 0),
    (parser, "_held_length", lambda *_: 0),
    (thinking.ThinkingSplitter, "finish", lambda _: ("", "")),
    (messages_answer.MessagesAnswer, "_close", lambda _: b""),
    (responses_answer.ResponsesAnswer, "_status", lambda _: "completed"),
    (answer_module.Choice, "text", property(lambda choice: "".join(choice.parts[1:]))),
]


@pytest.mark.parametrize(("owner", "name", "fault"), MUTANTS, ids=[name for _, name, _ in MUTANTS])
def test_the_properties_find_planted_faults(rig: Rig, monkeypatch: pytest.MonkeyPatch, owner, name: str, fault):
    words = ["<think>hm</think>", "word ", "st", "op", " then ", HERMES]
    calling = ("template", words, [], [1], FinishReason.LENGTH)
    thinking_only = ("template", ["<think>hm</thi"], [], [1], FinishReason.LENGTH)

    def check() -> None:
        check_chats(rig, calling, tools=True, stops=True)
        check_chats(rig, calling, tools=True, stops=False)
        check_chats(rig, thinking_only, tools=True, stops=False)
        assert rig.whole_and_stream("template", CHAT, body_of(CHAT), [len(rig.said)])[0].reasoning == "hm</thi"

    check()
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        check()


def test_line_breaks_of_unicode_would_cut_events_if_they_were_left(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    prepare(rig, "template", ["a\u2028b"], [], [1], FinishReason.STOP)
    rig.sizes = [len(rig.said)]
    assert len(rig.ask("template", COMPLETIONS, body_of(COMPLETIONS)).text.decode().splitlines()) == 1
    monkeypatch.setattr(sse, "_LINE_BREAKS", ())
    assert len(rig.ask("template", COMPLETIONS, body_of(COMPLETIONS)).text.decode().splitlines()) > 1
