"""Gateway -> worker: a snapshot of the worker's prefix tree, after a gap in its events."""

from typing import Protocol

from core.rpc.channel import one_call
from core.rpc.convert.worker import snapshot_from_proto, snapshot_to_proto
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.worker import KvSnapshot
from tandem.v1 import membership_pb2 as pb
from tandem.v1 import membership_pb2_grpc

SERVICE = "tandem.v1.KvIndex"


class KvIndexService(Protocol):
    """What every worker implements. Asyncio thread."""

    async def snapshot(self) -> KvSnapshot:
        """Return the tree's pages as of the batch that `sequence` names: that batch is in, the next is not."""
        ...


def add_kv_index(server: RpcServer, service: KvIndexService) -> None:
    """Serve `service` on `server`."""

    async def snapshot(_request: pb.SnapshotRequest) -> pb.SnapshotReply:
        return snapshot_to_proto(await service.snapshot())

    server.add_unary(SERVICE, "Snapshot", snapshot, pb.SnapshotRequest.FromString)


class KvIndexClient:
    """Fetches snapshots; one short connection per call."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    async def snapshot(self, address: str, timeout_s: float = 5.0) -> KvSnapshot:
        """Fetch a worker's snapshot. Raises `WorkerLost`, `DeadlineExceeded`, `ConfigError`."""
        async with one_call(address, timeout_s, self._proof.tls) as channel:
            stub = membership_pb2_grpc.KvIndexStub(channel)
            reply = await stub.Snapshot(pb.SnapshotRequest(), timeout=timeout_s, metadata=self._proof.metadata)
        return snapshot_from_proto(reply)
