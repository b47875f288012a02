"""What a request and a token cost the gateway, in calls: no clock tells that on a machine that others use too.

Whole but for sockets and gRPC: bytes of HTTP go into the server's protocol, and bytes of answers come out of it.
"""

import asyncio
import json
import time
from contextlib import contextmanager

import pytest
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from core.rpc.convert.stream import gateway_frame_to_proto, step_frame_from_proto, step_frame_to_proto
from core.stream import Finished, Started, StepFrame, Submit
from core.tracing.api import NullTracer
from gateway.http.asgi import build_asgi
from gateway.http.config import ApiConfig
from gateway.http.front import Front
from gateway.http.gatekeeper import Gatekeeper
from gateway.http.metrics import HttpMetrics
from gateway.http.protocol import GuardRules, guarded
from gateway.rate_limit import RateLimits
from gateway.tenants import Tenants
from tandem.v1 import generate_pb2 as pb
from tests.fakes.cluster import MODEL
from tests.fakes.deepseek import load_chat, write_trained
from tests.fakes.sim_gateway import SimGateway
from tests.fakes.work import calls_of

REQUEST_CALLS = 1500
"""It takes 1,300 with Python 3.11, of which the fakes here make about 200; before metrics without locks and requests
encoded in place it took 1,590."""
TOKEN_CALLS = 42
"""It takes 35 with 64 streams."""
STREAMS = 64


class Worker:
    """A stream to a worker that answers requests for one token at once, and steps the others when told."""

    def __init__(self, token):
        self.frames_left = asyncio.Queue()
        self.handles = []
        self.token = token
        self.sequence = 0

    async def open(self, *_):
        return self

    def post(self, frame):
        gateway_frame_to_proto(frame).SerializeToString()
        if not isinstance(frame, Submit):
            return
        started = Started(handle=frame.handle, num_cached_tokens=0, prefill_worker="p1", bytes_pulled=1000)
        if frame.request.stop.max_tokens == 1:
            self.say([frame.handle], started, Finished(handle=frame.handle, reason="length", num_output_tokens=1))
        else:
            self.handles.append(frame.handle)
            self.say([frame.handle], started)

    def say(self, handles, *records, position=0):
        self.sequence += 1
        count = len(handles)
        frame = StepFrame(
            sequence=self.sequence,
            handles=handles,
            positions=[position] * count,
            counts=[1] * count,
            tokens=[self.token] * count,
            records=records,
        )
        self.frames_left.put_nowait(step_frame_to_proto(frame).SerializeToString())

    async def frames(self):
        while True:
            yield step_frame_from_proto(pb.StepFrame.FromString(await self.frames_left.get()))

    async def close(self):
        pass


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__(extra={"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = []

    def write(self, data):
        self.written.append(data)

    def is_closing(self):
        return False

    def resume_reading(self):
        pass

    pause_reading = close = resume_reading


def spell(**fields):
    messages = [{"role": "user", "content": "Tell me about the weather in Paris."}]
    body = json.dumps({"model": MODEL, "messages": messages, "ignore_eos": True, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Whole:
    """One gateway with one worker of each role."""

    def __init__(self, directory):
        tokenizer, chat = load_chat(write_trained(directory))
        self.gateway = gateway = SimGateway()
        gateway.tasks[0].cancel()  # heartbeats: they would be counted too
        gateway.directory.ttl_s = 1e9
        self.worker = gateway.links._opener = Worker(tokenizer.encode_prompt("weather")[0])
        gateway.add_prefill("p1", max_tokens_total=1 << 20)
        gateway.add_decode("d1", max_tokens_total=1 << 20, num_rows=1024)
        gate = Gatekeeper(Tenants(""), RateLimits(gateway.clock))
        api = build_asgi(
            gateway.orchestrator,
            tokenizer,
            chat,
            ApiConfig(),
            clock=gateway.clock,
            metrics=HttpMetrics(CollectorRegistry()),
            is_ready=lambda: True,
            unix_time=time.time,
            gate=gate,
        )
        front = Front(
            api,
            gate=gate,
            pages={},
            clock=gateway.clock,
            tracer=NullTracer(),
            leases=gateway.leases,
            access_log=False,
        )
        self.server = uvicorn.Config(front, http=guarded(GuardRules()), loop="none", lifespan="off", log_config=None)
        self.server.load()

    async def connect(self):
        connection = self.server.http_protocol_class(config=self.server, server_state=ServerState(), app_state={})
        connection.connection_made(Transport())
        return connection

    async def ask(self, connection, data):
        """Send bytes and return what is written for them within some turns of the loop."""
        written = connection.transport.written
        written.clear()
        connection.data_received(data)
        await self.turns(20)
        return b"".join(written)

    async def turns(self, count=5):
        for _ in range(count):
            await asyncio.sleep(0)


@contextmanager
def whole(directory):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def build():
            return Whole(directory)

        gateway = runner.run(build())
        yield gateway, runner
        runner.run(gateway.gateway.close())


@pytest.fixture
def gateway(tmp_path):
    with whole(tmp_path) as found:
        yield found


def test_a_request_costs_so_many_calls(gateway):
    whole, runner = gateway
    connection, request = runner.run(whole.connect()), spell(max_tokens=1)
    for _ in range(10):
        assert b'"reasoning_content":"weather"' in runner.run(whole.ask(connection, request))
    assert calls_of(lambda: runner.run(whole.ask(connection, request))) < REQUEST_CALLS


def test_a_token_costs_so_few_calls(gateway):
    whole, runner = gateway
    connections = [runner.run(whole.connect()) for _ in range(STREAMS)]

    async def step(position):
        whole.worker.say(whole.worker.handles, position=position)
        await whole.turns()

    for connection in connections:
        assert b"data: " in runner.run(whole.ask(connection, spell(max_tokens=1000, stream=True)))
    for position in range(1, 12):
        runner.run(step(position))
    before = [len(connection.transport.written) for connection in connections]
    assert calls_of(lambda: runner.run(step(12))) < TOKEN_CALLS * STREAMS
    after = [len(connection.transport.written) for connection in connections]
    assert after == [count + 1 for count in before]
    for connection in connections:
        connection.connection_lost(None)
    runner.run(whole.turns())
