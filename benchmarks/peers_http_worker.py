"""A worker for routers that forward HTTP: answers OpenAI's chat route like an engine (`peers_text.step_s`).

Each step sends one token of English to every open stream, in a chunk of its own. A request for one token is answered
at once. Run by `benchmarks.gateway_peers`: `python -m benchmarks.peers_http_worker`; prints its port.
"""

import asyncio
import json
import sys
from typing import cast

import httptools
import uvloop

from benchmarks.peers_text import WORDS, step_s

JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
KNOWN = {
    b"/v1/models": {"object": "list", "data": [{"id": "sim", "object": "model", "created": 0, "owned_by": "x"}]},
    b"/server_info": {"model_path": "sim", "served_model_name": "sim", "dp_size": 1, "version": "0"},
    b"/model_info": {"model_path": "sim", "is_generation": True},
    b"/version": {"version": "0"},
}


def framed(event: bytes) -> bytes:
    """Wrap one event as a chunk of the body."""
    line = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(line), line)


def chunk_of(delta: dict[str, str], reason: str | None) -> bytes:
    """Spell one chat chunk, about 190 bytes."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    whole = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "sim",
        "choices": [choice],
    }
    return framed(json.dumps(whole, separators=(",", ":")).encode())


CHUNKS = [chunk_of({"content": word}, None) for word in WORDS]
FIRST = [chunk_of({"role": "assistant", "content": word}, None) for word in WORDS]
LAST = chunk_of({}, "length") + framed(b"[DONE]") + b"0\r\n\r\n"
UNARY = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion",
        "created": 1,
        "model": "sim",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": WORDS[0]}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
    }
).encode()


class Steps:
    """The streams that get a token each step."""

    def __init__(self) -> None:
        self.open: dict[Answering, tuple[int, int]] = {}
        """Tokens sent and wanted."""

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await asyncio.sleep(step_s(len(self.open)))
            for stream, (sent, wanted) in list(self.open.items()):
                if stream.is_behind:
                    continue
                stream.write((CHUNKS if sent else FIRST)[sent % len(CHUNKS)])
                if sent + 1 == wanted:
                    stream.write(LAST)
                    del self.open[stream]
                else:
                    self.open[stream] = (sent + 1, wanted)


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self.is_behind = False
        """Whether its reader is; it gets no token until it has read."""

    def pause_writing(self) -> None:
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = cast("asyncio.Transport", transport).write  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the base class's signature
        self._steps.open.pop(self, None)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        body, self._body = self._body, b""
        if self._parser.get_method() == b"POST":
            self._generate(json.loads(body))
        else:
            self._tell(json.dumps(KNOWN.get(url, {})).encode())

    def _tell(self, body: bytes) -> None:
        self.write(JSON % (len(body), body))

    def _generate(self, request: dict[str, object]) -> None:
        wanted = request.get("max_completion_tokens") or request.get("max_tokens")
        assert isinstance(wanted, int)
        if not request.get("stream"):
            self._tell(UNARY)
        elif wanted == 1:
            self.write(HEAD + FIRST[0] + LAST)
        else:
            self.write(HEAD)
            self._steps.open[self] = (0, wanted)


async def serve() -> None:
    """Serve until stdin closes."""
    steps = Steps()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(steps), "127.0.0.1", 0, backlog=2048)
    stepping = asyncio.create_task(steps.run())
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    stepping.cancel()


if __name__ == "__main__":
    uvloop.run(serve())
