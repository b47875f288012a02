"""The gateway stream: frames and records, proto <-> structs. The step frame is the hot path.

Arrays of a step frame cross as whole packed fields: no Python statement runs per token.
"""

from collections.abc import Sequence

import numpy as np

from core.errors import BadRequest
from core.ids import Handle, Incarnation, WorkerId
from core.rpc.convert.request import (
    error_to_proto,
    floors_from_proto,
    floors_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    request_from_proto,
    write_request,
)
from core.stream import (
    AbortRequest,
    Ack,
    Errored,
    Finished,
    FromGateway,
    Logprobs,
    NeedPrefill,
    Place,
    PrefillTarget,
    Record,
    Started,
    StepFrame,
    StreamHello,
    Submit,
)
from tandem.v1 import generate_pb2 as pb


def gateway_frame_to_proto(frame: FromGateway) -> pb.GatewayFrame:
    """Encode one frame of the gateway."""
    match frame:
        case Submit():
            message = pb.GatewayFrame()
            message.submit.handle = frame.handle
            write_request(message.submit.request, frame.request)
            if frame.prefill is not None:
                message.submit.prefill.CopyFrom(_target_to_proto(frame.prefill))
            return message
        case StreamHello():
            hello = pb.StreamHello(gateway=frame.gateway, worker=frame.worker, resume_after=frame.resume_after)
            return pb.GatewayFrame(hello=hello)
        case AbortRequest():
            return pb.GatewayFrame(abort=pb.AbortRequest(handle=frame.handle, reason=frame.reason))
        case Place():
            target = None if frame.prefill is None else _target_to_proto(frame.prefill)
            return pb.GatewayFrame(place=pb.Place(handle=frame.handle, prefill=target))
        case Ack():
            return pb.GatewayFrame(ack=pb.Ack(sequence=frame.sequence))


def gateway_frame_from_proto(message: pb.GatewayFrame) -> FromGateway:
    """Decode one frame of the gateway; raises `BadRequest` for a body that this version does not know."""
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return StreamHello(
                gateway=Incarnation(hello.gateway),
                worker=Incarnation(hello.worker),
                resume_after=hello.resume_after,
            )
        case "submit":
            submit = message.submit
            return Submit(
                handle=Handle(submit.handle),
                request=request_from_proto(submit.request),
                prefill=_target_from_proto(submit.prefill) if submit.HasField("prefill") else None,
            )
        case "abort":
            return AbortRequest(handle=Handle(message.abort.handle), reason=message.abort.reason)
        case "place":
            place = message.place
            target = _target_from_proto(place.prefill) if place.HasField("prefill") else None
            return Place(handle=Handle(place.handle), prefill=target)
        case "ack":
            return Ack(sequence=message.ack.sequence)
        case "part" | "batch" | None:
            # Parts are put together, and batches taken apart, before anything is decoded.
            raise BadRequest("the gateway sent a frame without a known body")


def _target_to_proto(target: PrefillTarget) -> pb.PrefillTarget:
    return pb.PrefillTarget(worker_id=target.worker_id, address=target.address, incarnation=target.incarnation)


def _target_from_proto(message: pb.PrefillTarget) -> PrefillTarget:
    return PrefillTarget(
        worker_id=WorkerId(message.worker_id),
        address=message.address,
        incarnation=Incarnation(message.incarnation),
    )


def step_frame_to_proto(frame: StepFrame) -> pb.StepFrame:
    """Encode one engine step; arrays may be numpy arrays of any integer type."""
    return pb.StepFrame(
        sequence=frame.sequence,
        handles=_ints(frame.handles),
        positions=_ints(frame.positions),
        counts=_ints(frame.counts),
        tokens=_ints(frame.tokens),
        records=[_record_to_proto(record) for record in frame.records],
    )


def step_frame_from_proto(message: pb.StepFrame) -> StepFrame:
    """Decode one engine step; arrays arrive as lists. Raises `BadRequest` for an unknown record."""
    return StepFrame(
        sequence=message.sequence,
        handles=message.handles[:],
        positions=message.positions[:],
        counts=message.counts[:],
        tokens=message.tokens[:],
        records=tuple(_record_from_proto(record) for record in message.records) if message.records else (),
    )


def _ints(values: Sequence[int]) -> Sequence[int]:
    # tolist() is one C loop; handing protobuf numpy scalars costs ten times as much.
    return values.tolist() if isinstance(values, np.ndarray) else values


def _record_to_proto(record: Record) -> pb.Record:
    match record:
        case Started():
            started = pb.Started(
                num_cached_tokens=record.num_cached_tokens,
                prefill_worker=record.prefill_worker,
                bytes_pulled=record.bytes_pulled,
                floors=floors_to_proto(record.floors),
            )
            return pb.Record(handle=record.handle, started=started)
        case Finished():
            finished = pb.Finished(
                reason=record.reason,
                num_output_tokens=record.num_output_tokens,
                recomputed_tokens=record.recomputed_tokens,
            )
            return pb.Record(handle=record.handle, finished=finished)
        case Errored():
            error = error_to_proto(record.code, record.message, record.retry_after_s)
            return pb.Record(handle=record.handle, errored=error)
        case NeedPrefill():
            need = pb.NeedPrefill(failed=record.failed, code=record.code, message=record.message)
            return pb.Record(handle=record.handle, need_prefill=need)
        case Logprobs():
            items = pb.Logprobs(items=[logprobs_to_proto(item) for item in record.items])
            return pb.Record(handle=record.handle, logprobs=items)


def _record_from_proto(message: pb.Record) -> Record:
    handle = Handle(message.handle)
    match message.WhichOneof("body"):
        case "started":
            started = message.started
            return Started(
                handle=handle,
                num_cached_tokens=started.num_cached_tokens,
                prefill_worker=started.prefill_worker,
                bytes_pulled=started.bytes_pulled,
                floors=floors_from_proto(started.floors),
            )
        case "finished":
            finished = message.finished
            return Finished(
                handle=handle,
                reason=finished.reason,
                num_output_tokens=finished.num_output_tokens,
                recomputed_tokens=finished.recomputed_tokens,
            )
        case "errored":
            error = message.errored
            return Errored(handle=handle, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        case "need_prefill":
            need = message.need_prefill
            return NeedPrefill(handle=handle, failed=need.failed, code=need.code, message=need.message)
        case "logprobs":
            return Logprobs(handle=handle, items=tuple(logprobs_from_proto(item) for item in message.logprobs.items))
        case None:
            raise BadRequest("the worker sent a record without a known body")
