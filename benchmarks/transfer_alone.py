"""The native libraries by themselves over the same records: what our adapters are measured against.

Straight calls in this process, as the libraries' own examples make them: NIXL with prepared strided lists, Mooncake with
synchronous batches of at most 1,024 descriptors.
"""

import importlib
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from core.ids import fresh_incarnation
from kv_transfer.backends.nixl_library import Nixl

Request = tuple[list[int], list[int], int]
BATCH = 1024


class Served(msgspec.Struct, frozen=True):
    """One library's source."""

    name: str
    address: int
    nbytes: int
    blob: bytes


def serve_alone(address: int, nbytes: int, names: Sequence[str]) -> tuple[list[Served], list[object]]:
    """Open the libraries of these transports over one region; returns what to tell, and what to keep alive."""
    served: list[Served] = []
    alive: list[object] = []
    for name in names:
        if name == "nixl":
            agent = _agent(address, nbytes, serves=True)
            alive.append(agent)
            served.append(Served(name, address, nbytes, agent.get_agent_metadata()))
        elif name == "mooncake":
            engine = _engine(address, nbytes)
            alive.append(engine)
            served.append(Served(name, address, nbytes, f"127.0.0.1:{engine.get_rpc_port()}".encode()))
    return served, alive


def _agent(address: int, nbytes: int, *, serves: bool):  # noqa: ANN202 - the library's own type
    agent = Nixl().agent(f"alone-{os.getpid()}-{fresh_incarnation()[:8]}", serves=serves)
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1", "ucx_devices": ""})
    agent.register_memory([(address, nbytes, 0, "")], "DRAM")
    return agent


def _engine(address: int, nbytes: int):  # noqa: ANN202 - the library's own type
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(address, nbytes) == 0
    return engine


class NixlAlone:
    """One READ a request, polled without a pause."""

    def __init__(self, served: Served, address: int, nbytes: int) -> None:
        self._agent = _agent(address, nbytes, serves=False)
        self._remote = self._agent.add_remote_agent(served.blob).decode()
        self._theirs, self._ours, self._nbytes = served.address, address, nbytes
        self._lists: dict[int, tuple[object, object]] = {}

    def run(self, requests: Sequence[Request]) -> None:
        for theirs, ours, n in requests:
            far, near = self._prepared(n)
            index = [np.array(offsets, np.int64) // n for offsets in (ours, theirs)]
            read = self._agent.make_prepped_xfer(
                "READ", near, index[0].astype(np.int32), far, index[1].astype(np.int32)
            )
            state = self._agent.transfer(read)
            while state == "PROC":
                time.sleep(0)
                state = self._agent.check_xfer_state(read)
            assert state == "DONE"
            read.release()

    def _prepared(self, n: int) -> tuple[object, object]:
        if n not in self._lists:
            rows = [np.array([[base, n, 0, n, self._nbytes // n]], np.uint64) for base in (self._theirs, self._ours)]
            self._lists[n] = (
                self._agent.prep_xfer_dlist(self._remote, rows[0], "DRAM"),
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows[1], "DRAM"),
            )
        return self._lists[n]


class MooncakeAlone:
    """One synchronous batch after the other."""

    def __init__(self, served: Served, address: int, nbytes: int) -> None:
        self._engine = _engine(address, nbytes)
        self._session = served.blob.decode()
        self._theirs, self._ours = served.address, address

    def run(self, requests: Sequence[Request]) -> None:
        for theirs, ours, n in requests:
            for at in range(0, len(ours), BATCH):
                local = [self._ours + offset for offset in ours[at : at + BATCH]]
                remote = [self._theirs + offset for offset in theirs[at : at + BATCH]]
                rc = self._engine.batch_transfer_sync_read(self._session, local, remote, [n] * len(local))
                assert rc == 0, rc


ALONE = {"nixl": NixlAlone, "mooncake": MooncakeAlone}
