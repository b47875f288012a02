"""Binding, refusing and stopping of the server; connecting of the channel."""

import asyncio
import contextlib
import socket
import time

import pytest

from core.errors import ConfigError, WorkerLost
from core.rpc.channel import connect, open_channel
from core.rpc.generate import GenerateClient, add_generate
from core.rpc.server import RpcServer, bind_failure
from core.stream import Ack, StreamHello
from tests.fakes.rpc import a_proof, serving


async def test_port_0_is_bound_and_told():
    server = RpcServer(a_proof())
    port = await server.start("127.0.0.1", 0)
    assert port == server.port > 0
    channel = await connect(f"127.0.0.1:{port}", 3.0)
    await channel.close()
    await server.stop(0)


async def test_a_port_in_use_is_one_plain_sentence():
    async with serving() as address:
        port = int(address.rpartition(":")[2])
        second = RpcServer(a_proof())
        with pytest.raises(ConfigError, match=f"cannot listen for gRPC on 127.0.0.1:{port}: address already in use"):
            await second.start("127.0.0.1", port)


async def test_a_host_that_is_not_ours_is_one_plain_sentence():
    server = RpcServer(a_proof())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: cannot assign requested address"):
        await server.start("192.0.2.1", 0)


def test_a_bind_that_would_work_now_is_told_so():
    assert bind_failure("127.0.0.1", 0) == ""


async def test_a_port_in_use_is_told_before_grpc_writes_of_it(capfd):
    async with serving() as address:
        capfd.readouterr()
        with pytest.raises(ConfigError):
            await RpcServer(a_proof()).start("127.0.0.1", int(address.rpartition(":")[2]))
        assert capfd.readouterr().err == ""


async def test_a_call_that_outlives_its_server_is_no_crash(caplog):
    """The body of a call may ask for the next frame when the server has stopped already."""
    ended = asyncio.Event()

    class Service:
        async def connect(self, hello, frames, send):
            await anext(frames)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
            await asyncio.sleep(0.1)
            try:
                await anext(frames)
            finally:
                ended.set()

    server = RpcServer(a_proof("b" * 32))
    add_generate(server, Service())
    port = await server.start("127.0.0.1", 0)
    client = GenerateClient(a_proof())
    stream = await client.open(f"127.0.0.1:{port}", StreamHello(gateway="g", worker="", resume_after=-1))
    stream.post(Ack(sequence=1))
    await asyncio.sleep(0.05)
    await server.stop(0)
    async with asyncio.timeout(30):
        await ended.wait()
    await asyncio.sleep(0)
    await stream.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_after_stop_the_port_is_free_again():
    async with serving() as address:
        pass
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def test_connecting_follows_a_server_that_comes_back_on_its_port():
    async with serving() as address:
        pass
    with pytest.raises(WorkerLost):
        await connect(address, 2.0)
    async with serving(port=int(address.rpartition(":")[2])):
        # No back-off of the failed attempt may hold up the next one.
        started = time.monotonic()
        channel = await connect(address, 10.0)
        assert time.monotonic() - started < 3.0
        await channel.close()


async def test_a_cancelled_connect_leaves_nothing_open():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        connecting = asyncio.ensure_future(connect(f"127.0.0.1:{silent.getsockname()[1]}", 30))
        await asyncio.sleep(0.05)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_a_name_that_does_not_resolve_is_a_lost_worker():
    with pytest.raises(WorkerLost):
        await connect("no-such-host.invalid:1", 5.0)


async def test_an_environment_proxy_is_not_asked(monkeypatch):
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.setblocking(False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        async with serving() as address:
            channel = await connect(address, 3.0)
            await channel.close()
        with pytest.raises(BlockingIOError):
            proxy.accept()


async def test_every_channel_is_a_connection_of_its_own():
    """Streams to one worker share no connection, so one that breaks or stalls takes no other with it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        channels = [open_channel(f"127.0.0.1:{listening.getsockname()[1]}") for _ in range(2)]
        for channel in channels:
            channel.get_state(try_to_connect=True)
        async with asyncio.timeout(30):
            for _ in channels:
                connection, _address = await loop.sock_accept(listening)
                connection.close()
        for channel in channels:
            await channel.close()
