"""What strange, slow and hostile clients may do to the real server: bytes on a socket against bytes that come back."""

import asyncio
import contextlib
import ssl

import httpx
import pytest

from core.errors import ConfigError
from gateway.http.client import read_body
from gateway.http.errors import HttpFault
from gateway.http.protocol import GuardRules
from gateway.http.server import HttpServer, HttpTls
from tests.fakes.certificates import Authority

OK = b"HTTP/1.1 200 OK"
BAD = b"HTTP/1.1 400 "
HOST = b"host: x\r\n"


class Echo:
    """Answers every request with what it understood of it; counts, so that a smuggled request shows."""

    def __init__(self, body_timeout_s=30.0):
        self.body_timeout_s = body_timeout_s
        self.seen = []
        self.running = 0
        self.entered, self.gone = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"].endswith("shutdown"):
                    return
        self.running += 1
        try:
            try:
                body = await read_body(scope, receive, max_bytes=1000, timeout_s=self.body_timeout_s)
                status, text = 200, f"{scope['method']} {scope['path']} {len(body)}".encode()
            except HttpFault as fault:
                status, text = fault.status, fault.code.encode()
            self.seen.append((scope["method"], scope["path"]))
            if scope["path"] == "/slow":
                self.entered.set()
                if (await receive())["type"] == "http.disconnect":
                    self.gone.set()
            headers = [(b"content-length", str(len(text)).encode())]
            if status != 200:
                headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text})
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def served(body_timeout_s=30.0, **options):
    app = Echo(body_timeout_s)
    server = HttpServer(app, "127.0.0.1", 0, **options)
    await server.start()
    try:
        yield app, server.port
    finally:
        await server.drain(1.0)


async def say(port, *parts, pause_s=0.0, end=True):
    """Send parts and return all that comes back until the server closes (or nothing more comes)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        if end:
            # The last request of each of these asks for a close, or is broken.
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(30):
                    return await reader.read()
        return b""
    finally:
        writer.close()


def post(*headers, body=b"", path=b"/a", version=b"1.1"):
    return (
        b"POST " + path + b" HTTP/" + version + b"\r\n" + HOST + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body
    )


SMUGGLING = {
    "length and chunked": post(
        b"content-length: 4", b"transfer-encoding: chunked", body=b"0\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n"
    ),
    "chunked and length": post(
        b"transfer-encoding: chunked", b"content-length: 4", body=b"0\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n"
    ),
    "two lengths": post(b"content-length: 4", b"content-length: 5", body=b"abcde"),
    "the same length twice": post(b"content-length: 4", b"content-length: 4", body=b"abcd"),
    "a list of lengths": post(b"content-length: 4, 4", body=b"abcd"),
    "a signed length": post(b"content-length: +4", body=b"abcd"),
    "a negative length": post(b"content-length: -1"),
    "a hexadecimal length": post(b"content-length: 0x4", body=b"abcd"),
    "an overflowing length": post(b"content-length: 18446744073709551617", body=b"a"),
    "chunked spelled otherwise": post(b"transfer-encoding: xchunked", body=b"0\r\n\r\n"),
    "chunked not last": post(b"transfer-encoding: chunked, identity", body=b"0\r\n\r\n"),
    "chunked twice": post(b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
    "a space before the colon": post(b"transfer-encoding : chunked", body=b"0\r\n\r\n"),
    "a folded header": post(b"x: a\r\n b", body=b""),
    "a bare newline in headers": b"POST /a HTTP/1.1\nhost: x\n\n",
    "a null in a header": post(b"x: a\x00b"),
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "a bad chunk size": post(b"transfer-encoding: chunked", body=b"zz\r\nabc\r\n0\r\n\r\n"),
    "a chunk longer than it says": post(b"transfer-encoding: chunked", body=b"3\r\nabcdef\r\n0\r\n\r\n"),
    "a space in the target": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "an unknown version": b"GET /a HTTP/3.9\r\nhost: x\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an unknown method": b"BREW /a HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
async def test_an_ambiguous_request_is_refused_and_nothing_behind_it_is_served(case):
    async with served() as (app, port):
        answer = await say(port, SMUGGLING[case])
        assert answer.startswith(BAD), answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not [path for _, path in app.seen if path == "/b"]
        assert app.running == 0


async def test_the_corpus_is_refused_for_its_faults_only():
    """Negative control: the same requests without the fault are answered."""
    async with served() as (app, port):
        close = b"connection: close"
        for good in (
            post(b"content-length: 4", close, body=b"abcd"),
            post(b"transfer-encoding: chunked", close, body=b"4\r\nabcd\r\n0\r\n\r\n"),
            post(b"transfer-encoding: CHUNKED", close, body=b"4;ext=1\r\nabcd\r\n0\r\n\r\n"),
        ):
            answer = await say(port, good)
            assert answer.startswith(OK)
            assert answer.endswith(b"POST /a 4")
        assert len(app.seen) == 3


async def test_too_large_headers_are_refused_whether_or_not_they_end():
    async with served(guard=GuardRules(max_header_bytes=4096, max_headers=20)) as (app, port):
        for flood in (
            b"GET /a HTTP/1.1\r\n" + HOST + b"x: " + b"a" * 8000 + b"\r\n\r\n",
            b"GET /a HTTP/1.1\r\n" + HOST + b"x: " + b"a" * 8000,
            b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET /a HTTP/1.1\r\n" + HOST + b"".join(b"x%d: y\r\n" % number for number in range(30)) + b"\r\n",
        ):
            assert (await say(port, flood)).startswith(b"HTTP/1.1 431 ")
        assert app.seen == []
        fits = b"GET /a HTTP/1.1\r\n" + HOST + b"connection: close\r\nx: " + b"a" * 3000 + b"\r\n\r\n"
        assert (await say(port, fits)).startswith(OK)


async def test_a_body_that_is_too_long_is_413_announced_or_not():
    async with served() as (_, port):
        assert (await say(port, post(b"content-length: 5000"))).startswith(b"HTTP/1.1 413 ")
        chunks = b"".join(b"64\r\n" + b"a" * 100 + b"\r\n" for _ in range(20))
        assert (await say(port, post(b"transfer-encoding: chunked", body=chunks))).startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_sends_its_headers_drop_by_drop_is_cut_off():
    async with served(guard=GuardRules(header_timeout_s=0.3)) as (app, port):
        silent = asyncio.create_task(say(port))
        drops = [bytes([byte]) for byte in b"GET /a HTTP/1.1\r\nhost: x\r\nx: yyyyyyyyyyyyyyyyyyyy"]
        slow = asyncio.create_task(say(port, *drops, pause_s=0.02))
        for answer in await asyncio.gather(silent, slow):
            assert answer.startswith(b"HTTP/1.1 408 ") or answer == b""
        assert app.seen == []


async def test_a_client_that_sends_its_body_drop_by_drop_is_cut_off():
    async with served(body_timeout_s=0.5) as (_, port):
        answer = await say(port, post(b"content-length: 100"), *[b"a"] * 8, pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_pipelined_requests_are_answered_in_order():
    async with served() as (app, port):
        requests = [b"GET /%d HTTP/1.1\r\n" % number + HOST + b"\r\n" for number in range(8)]
        answer = await say(port, b"".join(requests), b"GET /last HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
        assert answer.count(OK) == 9
        assert [path for _, path in app.seen] == [f"/{number}" for number in range(8)] + ["/last"]
        assert answer.index(b"GET /3 0") < answer.index(b"GET /4 0") < answer.index(b"GET /last 0")


async def test_http_1_0_is_answered_and_closed():
    async with served() as (_, port):
        answer = await say(port, b"GET /a HTTP/1.0\r\n\r\n")
        assert answer.startswith(OK)
        assert b"connection: close" in answer
        assert answer.endswith(b"GET /a 0")


async def test_a_client_that_waits_for_100_continue_gets_it():
    async with served() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"content-length: 4", b"expect: 100-continue", b"connection: close"))
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        writer.write(b"abcd")
        assert (await reader.read()).endswith(b"POST /a 4")
        writer.close()


async def test_a_client_that_closes_its_half_is_taken_for_gone():
    """A FIN is all that is seen of a client that left: to compute on for one that may still read would cost more."""
    async with served() as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n")
        async with asyncio.timeout(30):
            await app.entered.wait()
            writer.write_eof()
            assert await reader.read() == b""
            await app.gone.wait()
        writer.close()


async def test_connections_beyond_the_bound_are_told_so():
    async with served(guard=GuardRules(max_connections=3)) as (_, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        answer = await say(port, b"GET /a HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        for _, writer in idle:
            writer.close()


async def test_idle_gaps_between_requests_of_one_connection_cost_no_error():
    """Report 29: the server's idle time is longer than clients' pauses (scaled down: 10 s against gaps up to 0.3)."""
    async with served(guard=GuardRules(keep_alive_s=10.0)) as (app, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for gap in (0.0, 0.1, 0.3, 0.05):
            await asyncio.sleep(gap)
            writer.write(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n")
            answer = await reader.readuntil(b"GET /a 0")
            assert answer.startswith(OK)
        writer.close()
        assert len(app.seen) == 4
    assert GuardRules().keep_alive_s > 60, "longer than the idle time of common proxies"


async def test_tls_on_http_and_client_certificates(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("gateway", "localhost")
    trust = ssl.create_default_context(cafile=authority.path)
    async with served(tls=HttpTls(certificate=certificate, key=key)) as (_, port):
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(f"https://127.0.0.1:{port}/a")).text == "GET /a 0"
        assert not (await say(port, b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n")).startswith(OK)
    async with served(tls=HttpTls(certificate=certificate, key=key, client_authority=authority.path)) as (_, port):
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"https://127.0.0.1:{port}/a")
        trust.load_cert_chain(*authority.issue("client"))
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(f"https://127.0.0.1:{port}/a")).status_code == 200


async def test_a_renewed_http_certificate_is_shown_to_new_connections(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("gateway")
    server = HttpServer(Echo(), "127.0.0.1", 0, tls=HttpTls(certificate=certificate, key=key))
    await server.start()

    def shown():
        return ssl.get_server_certificate(("127.0.0.1", server.port))

    try:
        before = await asyncio.to_thread(shown)
        authority.issue("gateway")
        server.follow_certificate()
        assert await asyncio.to_thread(shown) != before
    finally:
        await server.drain(1.0)


async def test_a_wrong_certificate_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match=r"http\.tls"):
        await HttpServer(Echo(), "127.0.0.1", 0, tls=HttpTls(certificate="/nowhere", key="/nowhere")).start()


async def test_two_servers_share_a_port_only_if_both_say_so():
    async with served(reuse_port=True) as (_, port):
        other = HttpServer(Echo(), "127.0.0.1", port, reuse_port=True)
        await other.start()
        await other.drain(0.1)
        with pytest.raises(ConfigError):
            await HttpServer(Echo(), "127.0.0.1", port).start()
