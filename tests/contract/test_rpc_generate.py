"""The generate adapter over a real loopback server: frames both ways, refusals, and every way a stream can end."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest
import uvloop

from core.errors import BadRequest, ConfigError, Draining, TandemError, WorkerLost
from core.ids import Handle
from core.request import MmItem
from core.rpc import generate
from core.rpc.channel import connect
from core.rpc.generate import GenerateClient, add_generate
from core.rpc.pixels import PART_BYTES
from core.stream import AbortRequest, Ack, Errored, Finished, Started, StepFrame, Submit
from tandem.v1 import generate_pb2, generate_pb2_grpc
from tests.fakes.rpc import HANDLE, GenerateProbe, a_hello, a_proof, a_request, serving


def probe_server(probe):
    return serving(lambda server: add_generate(server, probe))


async def test_frames_travel_both_ways_in_order():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello(resume_after=4))
        sent = [Submit(handle=HANDLE, request=a_request()), AbortRequest(handle=HANDLE, reason="left"), Ack(sequence=3)]
        for frame in sent:
            await stream.send(frame)
        assert [await probe.frames.get() for _ in sent] == sent
        assert probe.hellos == [a_hello(resume_after=4)]
        send = await probe.send.get()
        await send(
            StepFrame(
                sequence=1,
                handles=np.array([7], np.uint32),
                positions=[0],
                counts=[2],
                tokens=np.array([5, 6], np.int32),
            )
        )
        await send(
            StepFrame(
                sequence=2,
                records=(
                    Started(handle=HANDLE, num_cached_tokens=0),
                    Finished(handle=HANDLE, reason="stop", num_output_tokens=2),
                ),
            )
        )
        frames = stream.frames()
        first, second = await anext(frames), await anext(frames)
        assert (first.sequence, list(first.handles), list(first.counts), list(first.tokens)) == (1, [7], [2], [5, 6])
        assert second.records == (
            Started(handle=HANDLE, num_cached_tokens=0),
            Finished(handle=HANDLE, reason="stop", num_output_tokens=2),
        )
        await stream.close()


async def test_images_cross_in_parts_of_bounded_size_and_an_abort_forgets_them():
    pixels = bytes(range(256)) * 3 * 4 * 700
    item = MmItem(digest=b"d" * 32, start=0, end=3, height=700, width=1024, pixels=pixels)
    request = msgspec.structs.replace(a_request(), mm_items=(item, item))
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        sizes = []
        post = stream._duplex.post
        stream._duplex.post = lambda message: (sizes.append(message.ByteSize()), post(message))[1]
        stream.post(Submit(handle=HANDLE, request=request))
        assert await probe.frames.get() == Submit(handle=HANDLE, request=request)
        assert max(sizes) < 1.01 * PART_BYTES
        assert len(sizes) == 2 * 3 + 1
        other = Handle(9)
        for message in list(generate._messages(Submit(handle=other, request=request)))[:-1]:
            post(message)
        abort = AbortRequest(handle=other)
        stream.post(abort)
        light = msgspec.structs.replace(request, mm_items=(msgspec.structs.replace(item, pixels=b""),))
        stream.post(Submit(handle=other, request=light))
        assert await probe.frames.get() == abort
        assert await probe.frames.get() == Submit(handle=other, request=light)
        await stream.close()


async def test_frames_of_one_turn_travel_together_and_arrive_apart_and_in_order(monkeypatch):
    monkeypatch.setattr(generate, "BATCH_BYTES", 2000)
    sizes = []
    joined = generate.batches

    def counting(messages):
        for message in joined(messages):
            sizes.append(len(message.batch.frames))
            yield message

    monkeypatch.setattr(generate, "batches", counting)
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        sent = [Submit(handle=Handle(number), request=a_request()) for number in range(100)]
        sent[50:50] = [AbortRequest(handle=Handle(3), reason="left"), Ack(sequence=3)]
        for frame in sent:
            stream.post(frame)
        assert [await probe.frames.get() for _ in sent] == sent
        await stream.close()
    assert sum(sizes) == len(sent)
    assert 1 < len(sizes) <= 50, "bounded in bytes, and far fewer than frames"


async def test_a_worker_that_does_not_say_that_it_takes_batches_gets_single_frames(monkeypatch):
    monkeypatch.setattr(generate, "batches", lambda _: pytest.fail("an older worker would refuse it"))
    served = generate._ServedStream._accept

    async def silent(self):
        await self._context.send_initial_metadata(((generate.ACCEPTED_KEY, "1"),))
        self._accepted = True

    async def older(self):
        if not self._accepted:
            await silent(self)

    monkeypatch.setattr(generate._ServedStream, "_accept", older)
    assert served is not older
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        sent = [Ack(sequence=number) for number in range(5)]
        for frame in sent:
            stream.post(frame)
        assert [await probe.frames.get() for _ in sent] == sent
        await stream.close()


async def test_close_delivers_what_was_posted_and_ends_the_service_in_order():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        for number in range(500):
            stream.post(Ack(sequence=number))
        await stream.close()
        assert await probe.ended.get() == "closed"
        assert probe.frames.qsize() == 500
        assert [frame async for frame in stream.frames()] == []


async def test_a_cancelled_sender_or_reader_of_another_request_leaves_the_stream_whole():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        senders = [asyncio.ensure_future(stream.send(Submit(handle=Handle(n), request=a_request()))) for n in range(50)]
        await asyncio.sleep(0)
        for sender in senders[::2]:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        stream.post(Ack(sequence=99))
        while await probe.frames.get() != Ack(sequence=99):
            pass
        send = await probe.send.get()
        await send(StepFrame(sequence=1))
        assert (await anext(stream.frames())).sequence == 1
        await stream.close()


async def test_another_incarnation_is_refused_with_the_services_own_error():
    async with probe_server(GenerateProbe(WorkerLost("incarnation dd lives here"))) as address:
        with pytest.raises(WorkerLost, match="incarnation dd lives here"):
            await GenerateClient(a_proof()).open(address, a_hello())
    async with probe_server(GenerateProbe(Draining("going away", retry_after_s=2.5))) as address:
        with pytest.raises(Draining) as caught:
            await GenerateClient(a_proof()).open(address, a_hello())
    assert caught.value.retry_after_s == 2.5


async def test_a_wrong_secret_is_refused_before_the_service_sees_anything():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        with pytest.raises(ConfigError, match="secret"):
            await GenerateClient(a_proof(secret=b"another secret")).open(address, a_hello())
    assert probe.hellos == []


async def test_a_call_without_any_proof_is_unauthenticated():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        channel = await connect(address, 3.0)
        call = generate_pb2_grpc.GenerateStub(channel).Connect()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()
    assert probe.hellos == []


async def test_an_error_of_the_service_reaches_the_gateway_as_itself():
    class Failing(GenerateProbe):
        async def connect(self, hello, frames, send):
            await anext(frames)
            raise BadRequest("no such handle", param="handle")

    async with probe_server(Failing()) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        stream.post(Ack(sequence=1))
        with pytest.raises(BadRequest, match="no such handle") as caught:
            await anext(stream.frames())
        assert caught.value.param == "handle"
        await stream.close()


async def test_a_crash_of_the_service_is_logged_and_told(caplog):
    class Crashing(GenerateProbe):
        async def connect(self, hello, frames, send):
            await anext(frames)
            raise ZeroDivisionError("a bug")

    async with probe_server(Crashing()) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        stream.post(Ack(sequence=1))
        with pytest.raises(TandemError, match="a bug") as caught:
            await anext(stream.frames())
        assert caught.value.code == "internal"
        await stream.close()
    assert "ZeroDivisionError" in caplog.text


async def test_an_error_inside_a_task_group_of_the_service_is_told_as_itself():
    class Grouped(GenerateProbe):
        async def connect(self, hello, frames, send):
            await anext(frames)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.fail())

        async def fail(self):
            raise Draining("inside a group")

    async with probe_server(Grouped()) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        stream.post(Ack(sequence=1))
        with pytest.raises(Draining, match="inside a group"):
            await anext(stream.frames())
        await stream.close()


async def test_a_stream_that_the_worker_ends_is_a_lost_worker():
    class Leaving(GenerateProbe):
        async def connect(self, hello, frames, send):
            await send(StepFrame(sequence=1))

    async with probe_server(Leaving()) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        frames = stream.frames()
        assert (await anext(frames)).sequence == 1
        with pytest.raises(WorkerLost):
            await anext(frames)
        with pytest.raises(WorkerLost):
            await stream.send(Ack(sequence=1))
        await stream.close()


async def test_the_service_is_ended_when_the_gateway_breaks_off():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        await probe.send.get()
        stream._duplex._call.cancel()
        async with asyncio.timeout(30):
            assert await probe.ended.get() in {"broken", "closed"}
        await stream.close()


async def test_a_cancelled_consumer_of_frames_stays_cancelled():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        reading = asyncio.ensure_future(anext(stream.frames()))
        await probe.send.get()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await stream.close()


async def test_close_ends_a_consumer_that_waits_for_frames():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())

        async def consume():
            return [frame async for frame in stream.frames()]

        consumer = asyncio.ensure_future(consume())
        await probe.send.get()
        await stream.close()
        assert await consumer == []


async def test_nobody_listening_is_a_lost_worker_at_once():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="refused or unreachable"):
            await GenerateClient(a_proof()).open(f"127.0.0.1:{reserved.getsockname()[1]}", a_hello(), timeout_s=10)
        assert time.monotonic() - started < 5


async def test_a_peer_that_accepts_and_says_nothing_costs_at_most_the_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(WorkerLost, match=r"within 0\.3 s"):
            await GenerateClient(a_proof()).open(f"127.0.0.1:{silent.getsockname()[1]}", a_hello(), timeout_s=0.3)


async def test_a_stream_without_a_hello_is_refused():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        channel = await connect(address, 3.0)
        call = generate_pb2_grpc.GenerateStub(channel).Connect(metadata=a_proof().metadata)
        await call.write(generate_pb2.GatewayFrame(ack=generate_pb2.Ack(sequence=1)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()
    assert probe.hellos == []


async def test_records_with_errors_arrive_whole():
    probe = GenerateProbe()
    error = Errored(handle=HANDLE, code="worker_lost", message="näh", retry_after_s=1.5)
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        send = await probe.send.get()
        await send(StepFrame(sequence=1, records=(error,)))
        assert (await anext(stream.frames())).records == (error,)
        await stream.close()


SERVER_PROCESS = """
import asyncio, sys
from core.rpc.generate import add_generate
from core.stream import StepFrame
from tests.fakes.rpc import GenerateProbe, serving

class Steps(GenerateProbe):
    async def connect(self, hello, frames, send):
        await send(StepFrame(sequence=1))
        async for frame in frames:
            pass

async def main():
    async with serving(lambda server: add_generate(server, Steps())) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def a_server_process():
    root = Path(__file__).parents[2]
    process = subprocess.Popen(  # noqa: ASYNC220 - starts in milliseconds
        [sys.executable, "-c", SERVER_PROCESS],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root}/proto"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, (await asyncio.to_thread(process.stdout.readline)).strip()


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_worker_process_is_a_lost_worker(how):
    process, address = await a_server_process()
    try:
        stream = await GenerateClient(a_proof()).open(address, a_hello(), timeout_s=10)
        frames = stream.frames()
        assert (await anext(frames)).sequence == 1
        process.send_signal(how)
        async with asyncio.timeout(30):
            with pytest.raises(WorkerLost):
                await anext(frames)
        await stream.close()
    finally:
        end(process)


async def test_sending_to_a_gateway_that_is_gone_is_an_error_however_often():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        send = await probe.send.get()
        await send(StepFrame(sequence=1))
        stream._duplex._call.cancel()
        await probe.ended.get()
        for number in range(3):
            with pytest.raises(WorkerLost, match="gone"):
                await send(StepFrame(sequence=2 + number))
        await stream.close()


async def test_a_gateway_that_does_not_read_holds_up_the_sender_until_it_reads_or_goes():
    probe = GenerateProbe()
    big = StepFrame(sequence=1, tokens=[2**32 - 1] * 200_000)

    async def flood(send):
        while True:
            await send(big)
            sent.append(1)

    async with probe_server(probe) as address:
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        sent = []
        flooding = asyncio.ensure_future(flood(await probe.send.get()))
        held_at = -1
        async with asyncio.timeout(30):
            while held_at != len(sent):
                held_at = len(sent)
                await asyncio.sleep(0.2)
            frames = stream.frames()
            while len(sent) == held_at:
                await anext(frames)
            stream._duplex._call.cancel()
            with pytest.raises(WorkerLost, match="gone"):
                await flooding
        await stream.close()


async def test_a_caller_that_sends_no_first_frame_is_ended_by_a_deadline(monkeypatch):
    monkeypatch.setattr(generate, "HELLO_TIMEOUT_S", 0.05)
    async with probe_server(GenerateProbe()) as address:
        channel = await connect(address, 3.0)
        call = generate_pb2_grpc.GenerateStub(channel).Connect(metadata=a_proof().metadata)
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()


@pytest.mark.parametrize("idle_s", [0.0, 1.0], ids=["busy", "idle"])
async def test_a_stopped_worker_process_is_noticed_by_keepalive(idle_s):
    """A process that is frozen answers no ping and closes no socket: only the ping's deadline tells.

    Just after traffic gRPC has a bandwidth ping under way, later it sends one of its own: two ways to the same end.
    """
    process, address = await a_server_process()
    try:
        stream = await GenerateClient(a_proof()).open(address, a_hello(), timeout_s=10)
        frames = stream.frames()
        assert (await anext(frames)).sequence == 1
        await asyncio.sleep(idle_s)
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(WorkerLost):
                await anext(frames)
        await stream.close()
    finally:
        end(process)


async def test_bytes_that_are_no_message_end_the_stream_and_not_the_server():
    probe = GenerateProbe()
    async with probe_server(probe) as address:
        channel = await connect(address, 3.0)
        raw = channel.stream_stream("/tandem.v1.Generate/Connect")(metadata=a_proof().metadata)
        await raw.write(b"\xff\xff\xff")
        async with asyncio.timeout(30):
            assert await raw.code() is not grpc.StatusCode.OK
        await channel.close()
        assert probe.hellos == []
        stream = await GenerateClient(a_proof()).open(address, a_hello())
        await stream.close()


def test_the_stream_runs_on_uvloop():
    async def main():
        probe = GenerateProbe()
        async with probe_server(probe) as address:
            stream = await GenerateClient(a_proof()).open(address, a_hello())
            send = await probe.send.get()
            await send(StepFrame(sequence=1))
            frame = await anext(stream.frames())
            await stream.close()
            return frame.sequence

    assert uvloop.run(main()) == 1
