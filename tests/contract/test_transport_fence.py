"""`quiesced` is the truth: after it no byte changes. The oracle is the memory, the peers are real processes.

Also: a source survives the death of its readers.
"""

import json
import random
import time

import msgspec
import numpy as np
import pytest

from core.errors import TransferFailed
from core.ids import LeaseId
from kv_transfer.api import OpState, PeerInfo
from kv_transfer.config import TransferConfig
from tests.fakes.kv_ends import copies, open_ends
from tests.fakes.kv_peer_process import peer_process

ROUNDS = 3
PAGE, PAGES = 1 << 20, 48
NBYTES = PAGE * PAGES
WATCH_S = 0.3
"""How long memory is watched after `quiesced`."""
FILL = 201


def changed(memory: np.ndarray) -> int:
    """Bytes (one of 4096) that were written since the memory was filled."""
    return int((memory[::4096] != FILL).sum())


@pytest.fixture(params=["cuda-ipc", "mooncake", "nixl", "nixl-tcp", "shm", "tcp"])
def remote(request, tmp_path):
    """A reader here, a source over there."""
    config = TransferConfig(segment_directory=str(tmp_path), progress_timeout_s=0.5, step_bytes=1 << 18)
    with (
        peer_process("source", request.param, tmp_path, PAGES, PAGE) as process,
        open_ends(request.param, str(tmp_path), config=config) as ends,
    ):
        said = json.loads(process.line())
        info = msgspec.msgpack.decode(bytes.fromhex(said["info"]), type=PeerInfo)
        target = ends.target(NBYTES)
        yield process, target, target.transport.connect(info, 5.0), LeaseId(said["lease"])


def begin(target, peer, lease, rng):
    """Post a large read and return when it is under way, at a random moment."""
    order = rng.sample(range(PAGES), PAGES)
    records = copies([p * PAGE for p in order], [p * PAGE for p in range(PAGES)], [PAGE] * PAGES)
    op = target.read(peer, records, lease)
    stop_at = rng.random() * 0.5 * NBYTES
    while op.landed_bytes < stop_at and not target.transport.quiesced(op):
        time.sleep(0)
    return op


def watch(target) -> int:
    """Give the memory to somebody else and count what is still written into it."""
    target.bytes[:] = FILL
    time.sleep(WATCH_S)
    return changed(target.bytes)


def test_nothing_lands_after_a_cancelled_read_is_quiesced(remote):
    _, target, peer, lease = remote
    rng = random.Random(1)
    for _ in range(ROUNDS):
        op = begin(target, peer, lease, rng)
        target.transport.cancel(op)
        target.wait(op)
        assert watch(target) == 0
    op = target.read(peer, copies([0], [0], [PAGE]), lease)
    target.wait(op)
    assert op.state is OpState.DONE


def test_nothing_lands_after_the_source_was_killed(remote):
    process, target, peer, lease = remote
    op = begin(target, peer, lease, random.Random(2))
    process.kill()
    target.wait(op)
    assert watch(target) == 0
    assert op.state in (OpState.DONE, OpState.FAILED)


def test_nothing_lands_after_a_stalled_source_woke_up_again(remote):
    process, target, peer, lease = remote
    rng = random.Random(3)
    for _ in range(ROUNDS):
        op = begin(target, peer, lease, rng)
        process.stop()
        target.wait(op)
        target.bytes[:] = FILL
        process.resume()
        time.sleep(WATCH_S)
        assert changed(target.bytes) == 0
    op = target.read(peer, copies([0], [0], [PAGE]), lease)
    target.wait(op)
    assert op.state is OpState.DONE, op.error


def test_nothing_lands_after_the_reader_was_destroyed(remote):
    _, target, peer, lease = remote
    op = begin(target, peer, lease, random.Random(4))
    target.transport.destroy()
    assert target.transport.quiesced(op)
    assert watch(target) == 0


def test_a_transport_that_lies_would_be_caught(remote):
    """Negative control: taking `quiesced` for granted right after a post shows late writes."""
    _, target, peer, lease = remote
    op = target.read(peer, copies([0], [0], [NBYTES]), lease)
    assert not target.transport.quiesced(op)
    assert watch(target) > 0
    target.wait(op)


@pytest.mark.parametrize("transport", ["cuda-ipc", "mooncake", "nixl", "nixl-tcp", "shm", "tcp"])
def test_a_source_survives_the_death_of_its_readers(transport, tmp_path):
    """The process does; what reads for it may have to be opened again (NIXL over TCP aborts the side that is read)."""
    with open_ends(transport, str(tmp_path)) as ends:
        source, target = ends.source(PAGES, PAGE), ends.target(NBYTES)
        lease = source.lease(range(PAGES))
        for _ in range(ROUNDS):
            info = reads_all(source, target, lease)
            with peer_process(
                "reader", transport, tmp_path, NBYTES, lease, msgspec.msgpack.encode(info).hex()
            ) as reader:
                assert reader.line() == "reading\n"
                reader.kill()
        reads_all(source, target, lease)


def reads_all(source, target, lease) -> PeerInfo:
    """Handshake and read everything, as often as a destination would that lost the source's engine under way."""
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end, "the source cannot be read any more"
        target.bytes[:] = 0
        try:
            info = source.transport.export()
            peer = target.transport.connect(info, 5.0)
            op = target.read(peer, copies([0], [0], [NBYTES]), lease)
        except TransferFailed:
            time.sleep(0.05)
            continue
        target.wait(op)
        if op.state is OpState.DONE:
            assert np.array_equal(target.bytes, source.bytes)
            peer.disconnect()
            return info
