"""Hand-over messages between destination and source: proto <-> structs. Total over both unions."""

from collections.abc import Iterable

from core.errors import BadRequest
from core.handover import (
    Abort,
    Aborted,
    Accept,
    ChunkReady,
    Failed,
    Final,
    FromD,
    FromP,
    Gone,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloReply,
    Prepare,
    Reject,
    Release,
    Released,
    Stale,
)
from core.ids import Incarnation, LeaseId, TransferId
from core.kv import PageRef
from core.rpc.convert.request import (
    error_to_proto,
    floors_from_proto,
    floors_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    request_from_proto,
    request_to_proto,
)
from tandem.v1 import kv_source_pb2 as pb


def from_destination_to_proto(message: FromD) -> pb.FromDestination:
    """Encode a message of D."""
    transfer = message.transfer
    match message:
        case Hello():
            hello = pb.LinkHello(
                incarnation=message.incarnation,
                expected=message.expected or "",
                fingerprint=message.fingerprint,
                layout=message.layout,
            )
            return pb.FromDestination(transfer=transfer, hello=hello)
        case Prepare():
            prepare = pb.Prepare(
                request=request_to_proto(message.request),
                prefix_tokens=message.prefix_tokens,
                lease_ttl_s=message.lease_ttl_s,
                digests=message.digests,
            )
            return pb.FromDestination(transfer=transfer, prepare=prepare)
        case Release():
            return pb.FromDestination(transfer=transfer, release=pb.Release(lease=message.lease))
        case Abort():
            return pb.FromDestination(transfer=transfer, abort=pb.Abort(reason=message.reason))
        case Heartbeat():
            heartbeat = pb.Heartbeat(leases=message.leases, ttl_s=message.ttl_s)
            return pb.FromDestination(transfer=transfer, heartbeat=heartbeat)


def from_destination_from_proto(message: pb.FromDestination) -> FromD:
    """Decode a message of D; raises `BadRequest` for a body that this version does not know."""
    transfer = TransferId(message.transfer)
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return Hello(
                transfer=transfer,
                incarnation=Incarnation(hello.incarnation),
                expected=Incarnation(hello.expected) if hello.expected else None,
                fingerprint=hello.fingerprint,
                layout=hello.layout,
            )
        case "prepare":
            prepare = message.prepare
            return Prepare(
                transfer=transfer,
                request=request_from_proto(prepare.request),
                prefix_tokens=prepare.prefix_tokens,
                lease_ttl_s=prepare.lease_ttl_s,
                digests=prepare.digests,
            )
        case "release":
            return Release(transfer=transfer, lease=LeaseId(message.release.lease))
        case "abort":
            return Abort(transfer=transfer, reason=message.abort.reason)
        case "heartbeat":
            return Heartbeat(transfer=transfer, leases=_leases(message.heartbeat.leases), ttl_s=message.heartbeat.ttl_s)
        case "part" | None:
            # Parts are put together before anything is decoded.
            raise BadRequest("the destination sent a message without a known body")


def from_source_to_proto(message: FromP) -> pb.FromSource:
    """Encode a message of P."""
    transfer = message.transfer
    match message:
        case HelloReply():
            exports = [pb.Export(transport=name, blob=blob) for name, blob in message.exports]
            hello = pb.LinkHelloReply(
                incarnation=message.incarnation,
                fingerprint=message.fingerprint,
                layout=message.layout,
                exports=exports,
            )
            return pb.FromSource(transfer=transfer, hello=hello)
        case Accept():
            accept = pb.Accept(lease=message.lease, expires_in_s=message.expires_in_s)
            return pb.FromSource(transfer=transfer, accept=accept)
        case Reject():
            error = error_to_proto(message.code, message.message, message.retry_after_s)
            return pb.FromSource(transfer=transfer, reject=error)
        case ChunkReady():
            return pb.FromSource(transfer=transfer, chunk_ready=_chunk_to_proto(message))
        case Final():
            return pb.FromSource(transfer=transfer, final=_final_to_proto(message))
        case Failed():
            error = error_to_proto(message.code, message.message, message.retry_after_s)
            return pb.FromSource(transfer=transfer, failed=error)
        case Released():
            return pb.FromSource(transfer=transfer, released=pb.Released(valid=message.valid))
        case Aborted():
            return pb.FromSource(transfer=transfer, aborted=pb.Aborted())
        case HeartbeatReply():
            return pb.FromSource(transfer=transfer, heartbeat=pb.HeartbeatReply(lost=message.lost))
        case Gone():
            return pb.FromSource(transfer=transfer, gone=pb.Gone())
        case Stale():
            return pb.FromSource(transfer=transfer, stale=pb.Stale(incarnation=message.incarnation))


def from_source_from_proto(message: pb.FromSource) -> FromP:
    """Decode a message of P; raises `BadRequest` for a body that this version does not know."""
    transfer = TransferId(message.transfer)
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return HelloReply(
                transfer=transfer,
                incarnation=Incarnation(hello.incarnation),
                fingerprint=hello.fingerprint,
                layout=hello.layout,
                exports=tuple((export.transport, export.blob) for export in hello.exports),
            )
        case "accept":
            accept = message.accept
            return Accept(transfer=transfer, lease=LeaseId(accept.lease), expires_in_s=accept.expires_in_s)
        case "reject":
            error = message.reject
            return Reject(transfer=transfer, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        case "chunk_ready":
            return _chunk_from_proto(transfer, message.chunk_ready)
        case "final":
            return _final_from_proto(transfer, message.final)
        case "failed":
            error = message.failed
            return Failed(transfer=transfer, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        case "released":
            return Released(transfer=transfer, valid=message.released.valid)
        case "aborted":
            return Aborted(transfer=transfer)
        case "heartbeat":
            return HeartbeatReply(transfer=transfer, lost=_leases(message.heartbeat.lost))
        case "gone":
            return Gone(transfer=transfer)
        case "stale":
            return Stale(transfer=transfer, incarnation=Incarnation(message.stale.incarnation))
        case None:
            raise BadRequest("the source sent a message without a known body")


def _leases(values: Iterable[int]) -> tuple[LeaseId, ...]:
    return tuple(LeaseId(value) for value in values)


def _chunk_to_proto(chunk: ChunkReady) -> pb.ChunkReady:
    return pb.ChunkReady(
        chunk=chunk.chunk,
        start=chunk.start,
        end=chunk.end,
        pages=[ref.page for ref in chunk.pages],
        epochs=[ref.epoch for ref in chunk.pages],
        digests=chunk.digests,
    )


def _chunk_from_proto(transfer: TransferId, message: pb.ChunkReady) -> ChunkReady:
    if len(message.pages) != len(message.epochs):
        raise BadRequest("a chunk names another number of pages than of epochs")
    return ChunkReady(
        transfer=transfer,
        chunk=message.chunk,
        start=message.start,
        end=message.end,
        pages=tuple(PageRef(page, epoch) for page, epoch in zip(message.pages, message.epochs, strict=True)),
        digests=tuple(message.digests),
    )


def _final_to_proto(final: Final) -> pb.Final:
    return pb.Final(
        num_tokens=final.num_tokens,
        num_chunks=final.num_chunks,
        first_tokens=final.first_tokens,
        logprobs=[logprobs_to_proto(item) for item in final.logprobs],
        num_cached_tokens=final.num_cached_tokens,
        finish=final.finish,
        row=final.row,
        row_generation=final.row_generation,
        row_digests=final.row_digests,
        floors=floors_to_proto(final.floors),
    )


def _final_from_proto(transfer: TransferId, message: pb.Final) -> Final:
    return Final(
        transfer=transfer,
        num_tokens=message.num_tokens,
        num_chunks=message.num_chunks,
        first_tokens=tuple(message.first_tokens),
        logprobs=tuple(logprobs_from_proto(item) for item in message.logprobs),
        num_cached_tokens=message.num_cached_tokens,
        finish=message.finish,
        row=message.row,
        row_generation=message.row_generation,
        row_digests=tuple(message.row_digests),
        floors=floors_from_proto(message.floors),
    )
