"""SSE framing: any text and any cut into deltas gives events that a strict parser, fed any bytes at a time, reads back."""

import asyncio
import json

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import FinishReason
from gateway.http.answer import Usage
from gateway.http.chat import ChatAnswer
from gateway.text.piece import Piece
from gateway.text.template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.generator import ScriptedGenerator, play
from tests.fakes.http_api import BODY, CHAT, build_api
from tests.fakes.tokenizer import CHAT_TEMPLATE, byte_level_definition, fixed_now

TOKENIZER = Tokenizer(byte_level_definition(), template=ChatTemplate(CHAT_TEMPLATE, {}, fixed_now))
HARD = st.text(alphabet=st.sampled_from(list('a"\\\n\r\t\u2028\u2029\x85\x00\x1f/<>é你🌍')), max_size=12)


class StrictReader:
    """Reads a byte stream of events as the rules of the interface allow them, nothing more."""

    def __init__(self) -> None:
        self._buffer = b""
        self.events: list[str] = []

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while b"\n\n" in self._buffer:
            event, self._buffer = self._buffer.split(b"\n\n", 1)
            assert event.startswith(b"data: ")
            assert b"\n" not in event
            assert b"\r" not in event
            self.events.append(event.removeprefix(b"data: ").decode())

    def close(self) -> None:
        assert self._buffer == b""


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(HARD, max_size=6), st.integers(1, 40), st.booleans())
def test_every_text_survives_framing_for_a_reader_that_gets_any_bytes_at_a_time(
    texts: list[str], step: int, continuous: bool
):
    form = ChatAnswer(
        answer_id='id"\n',
        model='m"\n\u2028',
        created=1,
        num_choices=1,
        vocabulary=TOKENIZER.vocabulary,
        include_usage=continuous,
        continuous_usage=continuous,
        with_logprobs=False,
    )
    usage = Usage(3)
    pieces = [Piece(text, 1) for text in texts] + [Piece("", 0, finish=FinishReason.STOP)]
    data = form.opening(0, usage) + b"".join(form.piece(0, piece, usage) for piece in pieces)
    data += form.closing(usage)
    reader = StrictReader()
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
    reader.close()
    assert reader.events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in reader.events]
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]]
    assert "".join(parts) == "".join(texts)
    # Lines as the common clients cut them: characters such as U+2028 may not end one early.
    lines = httpx.Response(200, content=data).iter_lines()
    assert [line for line in lines if line and not line.startswith("data: ")] == []


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 399), min_size=1, max_size=25), st.integers(1, 6), st.integers(1, 3))
def test_whatever_tokens_come_the_stream_is_well_framed_and_says_their_text(ids: list[int], chunk: int, n: int):
    async def stream() -> bytes:
        api, _ = build_api(ScriptedGenerator(lambda _: play(ids, chunk=chunk)), TOKENIZER)
        return (await post(CHAT, {**BODY, "stream": True, "n": n, "ignore_eos": True}).run(api)).text

    reader = StrictReader()
    reader.feed(asyncio.run(stream()))
    reader.close()
    assert reader.events.pop() == "[DONE]"
    texts = [""] * n
    for event in reader.events:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [TOKENIZER.decode(ids)] * n


def test_a_reader_this_strict_refuses_a_glued_event():
    """Negative control."""
    reader = StrictReader()
    try:
        reader.feed(b'data: {"a":1}\ndata: {"error":1}\n\n')
    except AssertionError:
        return
    raise RuntimeError("the reader accepted two lines in one event")
