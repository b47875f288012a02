"""A reader of several sources loses none but the one that died: what they share in a native library goes on."""

import json

import msgspec
import numpy as np
import pytest

from core.ids import LeaseId
from kv_transfer.api import OpState, PeerInfo
from kv_transfer.config import TransferConfig
from tests.fakes.kv_ends import copies, open_ends
from tests.fakes.kv_peer_process import peer_process

PAGE, PAGES = 1 << 18, 32
NBYTES = PAGE * PAGES


def connected(process, target):
    said = json.loads(process.line())
    info = msgspec.msgpack.decode(bytes.fromhex(said["info"]), type=PeerInfo)
    return target.transport.connect(info, 10.0), LeaseId(said["lease"])


@pytest.mark.parametrize("transport", ["mooncake", "nixl", "nixl-tcp", "tcp"])
def test_a_source_is_read_on_while_another_dies_amid_its_reads(transport, tmp_path):
    config = TransferConfig(segment_directory=str(tmp_path), progress_timeout_s=2.0, step_bytes=PAGE)
    everything = copies([0], [0], [NBYTES])
    with (
        open_ends(transport, str(tmp_path), config=config) as ends,
        peer_process("source", transport, tmp_path, PAGES, PAGE) as mortal,
        peer_process("source", transport, tmp_path, PAGES, PAGE) as other,
    ):
        target = ends.target(2 * NBYTES)
        doomed, doomed_lease = connected(mortal, target)
        peer, lease = connected(other, target)
        lost = [target.read(doomed, everything, doomed_lease) for _ in range(4)]
        kept = [target.read(peer, copies([0], [NBYTES], [NBYTES]), lease) for _ in range(2)]
        mortal.kill()
        kept += [target.read(peer, copies([0], [NBYTES], [NBYTES]), lease) for _ in range(4)]
        target.wait(*kept, *lost)
        assert [op.error for op in kept] == [None] * 6
        assert {op.state for op in lost} <= {OpState.DONE, OpState.FAILED}
        again = target.read(peer, copies([0], [0], [NBYTES]), lease)
        target.wait(again)
        assert again.state is OpState.DONE
        assert np.array_equal(target.bytes[:NBYTES], target.bytes[NBYTES:])
        if hasattr(target.transport, "statistics"):
            assert target.transport.statistics()["engine_restarts"] == 0, "one death cost all readers their engine"
