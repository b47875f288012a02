"""The client of `benchmarks.gateway_peers`: many connections in one thread, read and counted as cheaply as possible."""

import json
import select
import socket
import time
from collections.abc import Iterator

BODY = {"model": "sim", "messages": [{"role": "user", "content": "Tell me about the weather in Paris."}]}
FOREVER = 1_000_000
ONE_READ = 1 << 16


def spell(host: str, *, stream: bool, max_tokens: int) -> bytes:
    """Return one request."""
    body = json.dumps({**BODY, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Links:
    """Open connections to one server."""

    def __init__(self, port: int, count: int) -> None:
        self._poll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        for _ in range(count):
            link = socket.create_connection(("127.0.0.1", port), timeout=60)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets[link.fileno()] = link
            self._poll.register(link.fileno(), select.EPOLLIN)

    def read_until(self, end: float) -> Iterator[tuple[int, bytes]]:
        """Yield what comes on which connection until then; ConnectionError if one is closed."""
        while (left := end - time.monotonic()) > 0:
            for number, _ in self._poll.poll(min(left, 0.05)):
                data = self.sockets[number].recv(ONE_READ)
                if not data:
                    raise ConnectionError("the server closed a connection")
                yield number, data

    def close(self) -> None:
        """Leave."""
        for link in self.sockets.values():
            link.close()
        self._poll.close()


class Streams:
    """Endless streams that begin together."""

    def __init__(self, port: int, count: int) -> None:
        self._links = Links(port, count)
        self._begun: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        """Seconds from sending the request to the first event, by connection."""
        self.num_events = 0
        self.num_tokens = 0
        request = spell(f"127.0.0.1:{port}", stream=True, max_tokens=FOREVER)
        for number, link in self._links.sockets.items():
            link.sendall(request)
            self._begun[number] = time.monotonic()

    def read_for(self, seconds: float) -> None:
        """Count events and tokens; ConnectionError if a stream ends, RuntimeError if one is refused."""
        for number, data in self._links.read_until(time.monotonic() + seconds):
            events = data.count(b"data: ")
            self.num_events += events
            # One space in every token (`peers_text`), and one in every `data: `.
            self.num_tokens += data.count(b" ") - events
            if events and number not in self.first_s:
                self.first_s[number] = time.monotonic() - self._begun[number]
            elif number not in self.first_s and b" 200 OK" not in data[:32]:
                raise RuntimeError(f"refused: {data[:300]!r}")

    def all_begun(self, within_s: float) -> None:
        """Read until every stream has its first event; TimeoutError if one has none."""
        end = time.monotonic() + within_s
        while len(self.first_s) < len(self._begun):
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.first_s)} of {len(self._begun)} streams began")
            self.read_for(0.1)

    def close(self) -> None:
        """Leave all streams."""
        self._links.close()


def is_whole(answer: bytes) -> bool:
    """Whether an HTTP answer has come to its end."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return body.endswith(b"0\r\n\r\n")


def closed_loop(port: int, count: int, seconds: float, *, stream: bool) -> tuple[list[float], list[float]]:
    """Ask for one token again and again on so many connections; return (seconds to the first event, to the end).

    Without streaming the first event is the end. RuntimeError at an answer other than 200.
    """
    links = Links(port, count)
    request = spell(f"127.0.0.1:{port}", stream=stream, max_tokens=1)
    begun, parts = {}, {}
    first_s: list[float] = []
    whole_s: list[float] = []
    try:
        for number, link in links.sockets.items():
            begun[number], parts[number] = time.monotonic(), b""
            link.sendall(request)
        for number, data in links.read_until(time.monotonic() + seconds):
            now = time.monotonic()
            before = parts[number]
            answer = parts[number] = before + data
            if stream and b"data: " in answer and b"data: " not in before:
                first_s.append(now - begun[number])
            if is_whole(answer):
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"refused: {answer[:300]!r}")
                whole_s.append(now - begun[number])
                begun[number], parts[number] = time.monotonic(), b""
                links.sockets[number].sendall(request)
    finally:
        links.close()
    return first_s or whole_s, whole_s
