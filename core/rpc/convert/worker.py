"""Registration, KV events and snapshots: proto <-> structs."""

from core.errors import BadRequest
from core.ids import Incarnation, WorkerId
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Registration, Role
from tandem.v1 import membership_pb2 as pb


def registration_to_proto(registration: Registration) -> pb.Register:
    """Encode a registration."""
    return pb.Register(
        worker_id=registration.worker_id,
        incarnation=registration.incarnation,
        role=registration.role.value,
        model=registration.model,
        address=registration.address,
        http_address=registration.http_address,
        namespace=registration.namespace,
        fingerprint=registration.fingerprint,
        secret_check=registration.secret_check,
        page_tokens=registration.page_tokens,
        num_pages=registration.num_pages,
        num_rows=registration.num_rows,
        max_tokens_total=registration.max_tokens_total,
        vocab_size=registration.vocab_size,
        eos_token_ids=registration.eos_token_ids,
        prefill_mode=registration.prefill_mode,
        transports=registration.transports,
        domain=registration.domain,
        group_id=registration.group_id,
        dp_rank=registration.dp_rank,
        dp_size=registration.dp_size,
        tp_size=registration.tp_size,
        replay_tokens=registration.replay_tokens,
    )


def registration_from_proto(message: pb.Register) -> Registration:
    """Decode a registration; raises `BadRequest` for an unknown role."""
    try:
        role = Role(message.role)
    except ValueError as error:
        raise BadRequest(f"unknown role {message.role!r}", param="role") from error
    return Registration(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        role=role,
        model=message.model,
        address=message.address,
        http_address=message.http_address,
        namespace=message.namespace,
        fingerprint=message.fingerprint,
        secret_check=message.secret_check,
        page_tokens=message.page_tokens,
        num_pages=message.num_pages,
        num_rows=message.num_rows,
        max_tokens_total=message.max_tokens_total,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        prefill_mode=message.prefill_mode,
        transports=tuple(message.transports),
        domain=message.domain,
        group_id=message.group_id,
        dp_rank=message.dp_rank,
        dp_size=message.dp_size,
        tp_size=message.tp_size,
        replay_tokens=message.replay_tokens,
    )


def events_to_proto(batch: KvEventBatch) -> pb.KvEvents:
    """Encode one batch of KV events."""
    return pb.KvEvents(
        sequence=batch.sequence,
        events=[
            pb.KvEvent(kind=event.kind, hashes=event.hashes, parent=event.parent, medium=event.medium)
            for event in batch.events
        ],
    )


def events_from_proto(message: pb.KvEvents) -> KvEventBatch:
    """Decode one batch of KV events."""
    return KvEventBatch(
        sequence=message.sequence,
        events=tuple(
            KvEvent(kind=event.kind, hashes=tuple(event.hashes), parent=event.parent, medium=event.medium)
            for event in message.events
        ),
    )


def snapshot_to_proto(snapshot: KvSnapshot) -> pb.SnapshotReply:
    """Encode a snapshot of a worker's tree."""
    return pb.SnapshotReply(incarnation=snapshot.incarnation, sequence=snapshot.sequence, hashes=snapshot.hashes)


def snapshot_from_proto(message: pb.SnapshotReply) -> KvSnapshot:
    """Decode a snapshot of a worker's tree."""
    return KvSnapshot(
        incarnation=Incarnation(message.incarnation), sequence=message.sequence, hashes=tuple(message.hashes)
    )
