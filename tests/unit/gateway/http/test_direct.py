"""The short way of chunks to the socket says the same bytes as the server's own, and steps aside where it must."""

import asyncio
import json

import pytest

from gateway.http import client
from gateway.http.direct import DirectWriter, Joined
from tests.fakes.http_api import ANSWER, BODY, CHAT, serve_api, speaker


async def raw_answer(port, *, version="1.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**BODY, "stream": True, "seed": 3}).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    data = await reader.read()
    writer.close()
    return data


def text_of(data):
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: ") and b"[DONE]" not in line]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.fixture
def written(monkeypatch):
    """Bodies that took the short way."""
    bodies = []
    write = DirectWriter.write

    def counting(self, body):
        bodies.append(body)
        write(self, body)

    monkeypatch.setattr(DirectWriter, "write", counting)
    return bodies


def without_names(data):
    """The answer but for what differs between two requests: ids and the date."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [
        line
        for line in head.split(b"\r\n")
        if not line.lower().startswith((b"date", b"x-request-id", b"server-timing"))
    ]
    request_id = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id")).split()[1]
    return lines, body.replace(request_id, b"chatcmpl")


async def test_almost_all_of_a_stream_goes_the_short_way_and_reads_the_same(tokenizer, written, monkeypatch):
    async with serve_api(speaker(tokenizer), tokenizer) as served:
        short = await raw_answer(served.port)
        num_short = len(written)
        monkeypatch.setattr(client.Client, "takes_now", False)
        long = await raw_answer(served.port)
    assert text_of(short) == ANSWER
    assert num_short >= 5
    assert len(written) == num_short
    assert without_names(short) == without_names(long)


async def test_a_client_of_http_1_0_reads_the_same_text(tokenizer, written):
    async with serve_api(speaker(tokenizer), tokenizer) as served:
        data = await raw_answer(served.port, version="1.0")
    assert text_of(data) == ANSWER


class Cycle:
    """A server's answer under way."""

    def __init__(self, **state):
        self.flow = type("Flow", (), {"write_paused": state.pop("write_paused", False)})()
        self.transport = type("Transport", (), {"write": lambda _, data: None})()
        self.disconnected = self.response_complete = False
        self.chunked_encoding = True
        vars(self).update(state)


@pytest.mark.parametrize(
    "state",
    [{"write_paused": True}, {"disconnected": True}, {"response_complete": True}, {"chunked_encoding": None}],
    ids=str,
)
def test_what_is_unusual_goes_the_long_way(state):
    assert DirectWriter(Cycle(), set()).is_open
    assert not DirectWriter(Cycle(**state), set()).is_open


class Wire:
    """A transport that notes its writes."""

    def __init__(self):
        self.writes, self.closed = [], False

    def write(self, data):
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed


async def asked(port, *requests):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    data = await reader.read()
    writer.close()
    return data


def one_request(*, stream, close):
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return (head + "connection: close\r\n" * close).encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_head_and_what_follows_it_are_one_write(tokenizer, monkeypatch):
    flushed = []
    flush = Joined._flush

    def counting(self):
        if self._held:
            flushed.append(len(self._held))
        flush(self)

    monkeypatch.setattr(Joined, "_flush", counting)
    async with serve_api(speaker(tokenizer), tokenizer) as served:
        await asked(served.port, one_request(stream=False, close=True))
        await asked(served.port, one_request(stream=True, close=True))
    assert flushed == [2, 2]


async def test_requests_in_a_row_on_one_connection_are_all_answered(tokenizer):
    async with serve_api(speaker(tokenizer), tokenizer) as served:
        requests = [one_request(stream=number % 2 == 1, close=number == 4) for number in range(5)]
        data = await asked(served.port, *requests)
    assert data.count(b"HTTP/1.1 200 OK") == 5
    assert data.count(b"data: [DONE]") == 2


async def test_nothing_is_done_for_requests_behind_the_one_that_closes(tokenizer):
    generator = speaker(tokenizer)
    async with serve_api(generator, tokenizer) as served:
        await asked(served.port, one_request(stream=False, close=True), one_request(stream=False, close=True))
    assert len(generator.prompts) == 1


def test_a_close_while_joining_comes_behind_what_was_held():
    cycle = Cycle(transport=Wire())
    wire = cycle.transport
    with DirectWriter(cycle, set()).join():
        cycle.transport.write(b"head")
        cycle.transport.write(b"body")
        cycle.transport.close()
        assert cycle.transport.is_closing()
    assert wire.writes == [b"headbody"]
    assert wire.closed
    assert cycle.transport is wire
