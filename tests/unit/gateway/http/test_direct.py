"""The short way of chunks to the socket says the same bytes as the server's own, and steps aside where it must."""

import asyncio
import json

import pytest

from gateway.http import client
from gateway.http.direct import DirectWriter
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
    assert DirectWriter(Cycle()).is_open
    assert not DirectWriter(Cycle(**state)).is_open
