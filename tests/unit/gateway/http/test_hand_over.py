"""One process follows another on the same listening socket: no connection is lost, none is cut under a request."""

import asyncio
import os
from contextlib import asynccontextmanager

import pytest

from gateway.http.protocol import GuardRules
from gateway.http.server import HttpServer, bind


def application(name, hold=None):
    """Answers every request with `name`; a request to /slow waits for `hold`."""

    async def api(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["path"] == "/slow":
            await hold.wait()
        length = (b"content-length", str(len(name)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": name.encode()})

    return api


class Client:
    """One connection."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def ask(self, path="/"):
        self.write(path)
        return await self.read()

    def write(self, path="/"):
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())

    async def read(self):
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return (await self._reader.readexactly(3)).decode()

    async def is_closed(self):
        async with asyncio.timeout(30):
            return await self._reader.read(1) == b""


@pytest.fixture
async def listener():
    with bind("127.0.0.1", 0, reuse_port=False) as socket:
        socket.listen(64)
        yield socket


@asynccontextmanager
async def serving(listener, name, *, gate=None, hold=None):
    server = HttpServer(
        application(name, gate),
        "127.0.0.1",
        0,
        guard=GuardRules(keep_alive_s=30.0),
        listener_fd=os.dup(listener.fileno()),
        hold=hold,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.drain(0.1)


@pytest.fixture
async def connect(listener):
    writers = []

    async def one():
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return Client(reader, writer)

    yield one
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_the_old_process_answers_whom_it_has_and_the_new_one_takes_who_comes(listener, connect):
    gate = asyncio.Event()
    async with serving(listener, "old", gate=gate) as old:
        idle, fresh, slow, late = [await connect() for _ in range(4)]
        assert await idle.ask() == "old"
        assert await late.ask() == "old"
        slow.write("/slow")
        await asyncio.sleep(0.05)
        old.hand_over()
        async with serving(listener, "new"):
            assert await (await connect()).ask() == "new"
            # A request on a connection that the old one has is its last.
            assert await late.ask() == "old"
            assert await late.is_closed()
            closing = asyncio.create_task(old.close_idle())
            assert await idle.is_closed()
            await asyncio.sleep(0.2)
            assert not closing.done(), "one client has not asked yet"
            assert await fresh.ask() == "old"
            await closing
            gate.set()
            assert await slow.read() == "old"
            assert await slow.is_closed()


async def test_connections_wait_until_the_new_process_is_let_go(listener, connect):
    go = asyncio.Event()
    async with serving(listener, "new", hold=go.wait):
        client = await connect()
        answer = asyncio.create_task(client.ask())
        await asyncio.sleep(0.2)
        assert not answer.done()
        go.set()
        assert await answer == "new"


async def test_a_process_that_was_never_let_go_leaves_at_once(listener):
    async with asyncio.timeout(30):
        async with serving(listener, "new", hold=asyncio.Event().wait):
            await asyncio.sleep(0.05)
