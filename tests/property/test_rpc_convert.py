"""Every struct that crosses the wire comes back equal, through real bytes; what the wire may not say is refused."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import handover, stream, worker
from core.errors import BadRequest
from core.handover import TokenLogprobs
from core.kv import PageRef
from core.lifecycle import State
from core.request import Floors, GenerateRequest, MmItem, SamplingParams, StopRules
from core.rpc.convert import handover as convert_handover
from core.rpc.convert import request as convert_request
from core.rpc.convert import stream as convert_stream
from core.rpc.convert import worker as convert_worker
from tandem.v1 import generate_pb2, kv_source_pb2, membership_pb2, types_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
S32 = st.integers(-(2**31), 2**31 - 1)
S64 = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BYTES = st.binary(max_size=16)


def tuples(of, most=4):
    return st.lists(of, max_size=most).map(tuple)


LOGPROBS = st.builds(TokenLogprobs, token=U32, logprob=NUMBER, top=tuples(st.tuples(U32, NUMBER)))
SAMPLING = st.builds(
    SamplingParams,
    temperature=NUMBER,
    top_k=U32,
    top_p=NUMBER,
    min_p=NUMBER,
    repetition_penalty=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    logit_bias=st.dictionaries(U32, NUMBER, max_size=3),
    seed=U64,
    sample_index=U32,
    num_logprobs=S32,
    prompt_logprobs=st.booleans(),
)
STOP = st.builds(StopRules, max_tokens=U32, min_tokens=U32, stop_token_ids=tuples(U32), ignore_eos=st.booleans())
REQUEST = st.builds(
    GenerateRequest,
    request_id=TEXT,
    attempt=U32,
    model=TEXT,
    token_ids=tuples(U32, 20),
    num_prompt_tokens=U32,
    sampling=SAMPLING,
    stop=STOP,
    page_hashes=tuples(BYTES),
    timeout_s=NUMBER,
    priority=S32,
    tenant=TEXT,
    cache_salt=TEXT,
    num_cached_tokens=S32,
    encoder_floor=S32,
    decoder_floor=S32,
    floor_hit_tokens=S32,
    floor_earlier_hits=tuples(U32),
    lora=TEXT,
    traceparent=TEXT,
    mm_items=tuples(st.builds(MmItem, digest=BYTES, start=U32, end=U32, height=U32, width=U32, pixels=BYTES), 2),
    grammar=TEXT,
)
FLOORS = st.builds(Floors, encoder_floor=U32, decoder_floor=U32, hits=tuples(U32))
TARGET = st.none() | st.builds(stream.PrefillTarget, worker_id=TEXT, address=TEXT, incarnation=TEXT)
FROM_GATEWAY = st.one_of(
    st.builds(stream.StreamHello, gateway=TEXT, worker=TEXT, resume_after=S64),
    st.builds(stream.Submit, handle=U32, request=REQUEST, prefill=TARGET),
    st.builds(stream.AbortRequest, handle=U32, reason=TEXT),
    st.builds(stream.Place, handle=U32, prefill=TARGET),
    st.builds(stream.Ack, sequence=U64),
)
RECORD = st.one_of(
    st.builds(stream.Started, handle=U32, num_cached_tokens=U32, prefill_worker=TEXT, bytes_pulled=U64, floors=FLOORS),
    st.builds(stream.Finished, handle=U32, reason=TEXT, num_output_tokens=U32, recomputed_tokens=U32),
    st.builds(stream.Errored, handle=U32, code=TEXT, message=TEXT, retry_after_s=NUMBER),
    st.builds(stream.NeedPrefill, handle=U32, failed=TEXT, code=TEXT, message=TEXT),
    st.builds(stream.Logprobs, handle=U32, items=tuples(LOGPROBS)),
)
FRAME = st.builds(
    stream.StepFrame,
    sequence=U64,
    handles=st.lists(U32),
    positions=st.lists(U32),
    counts=st.lists(U32),
    tokens=st.lists(U32),
    records=tuples(RECORD),
)
FROM_D = st.one_of(
    st.builds(
        handover.Hello,
        transfer=TEXT,
        incarnation=TEXT,
        expected=st.none() | TEXT.filter(bool),
        fingerprint=BYTES,
        layout=BYTES,
    ),
    st.builds(
        handover.Prepare, transfer=TEXT, request=REQUEST, prefix_tokens=U32, lease_ttl_s=NUMBER, digests=st.booleans()
    ),
    st.builds(handover.Release, transfer=TEXT, lease=U64),
    st.builds(handover.Abort, transfer=TEXT, reason=TEXT),
    st.builds(handover.Heartbeat, transfer=TEXT, leases=tuples(U64), ttl_s=NUMBER),
)
FROM_P = st.one_of(
    st.builds(
        handover.HelloReply,
        transfer=TEXT,
        incarnation=TEXT,
        fingerprint=BYTES,
        layout=BYTES,
        exports=tuples(st.tuples(TEXT, BYTES)),
    ),
    st.builds(handover.Accept, transfer=TEXT, lease=U64, expires_in_s=NUMBER),
    st.builds(handover.Reject, transfer=TEXT, code=TEXT, message=TEXT, retry_after_s=NUMBER),
    st.builds(
        handover.ChunkReady,
        transfer=TEXT,
        chunk=U32,
        start=U32,
        end=U32,
        pages=tuples(st.builds(PageRef, U32, U32)),
        digests=tuples(U32),
    ),
    st.builds(
        handover.Final,
        transfer=TEXT,
        num_tokens=U32,
        num_chunks=U32,
        floors=FLOORS,
        first_tokens=tuples(U32),
        logprobs=tuples(LOGPROBS, 2),
        num_cached_tokens=U32,
        finish=TEXT,
        row=U32,
        row_generation=U32,
        row_digests=tuples(U32),
    ),
    st.builds(handover.Failed, transfer=TEXT, code=TEXT, message=TEXT, retry_after_s=NUMBER),
    st.builds(handover.Released, transfer=TEXT, valid=st.booleans()),
    st.builds(handover.Aborted, transfer=TEXT),
    st.builds(handover.HeartbeatReply, transfer=TEXT, lost=tuples(U64)),
    st.builds(handover.Gone, transfer=TEXT),
    st.builds(handover.Stale, transfer=TEXT, incarnation=TEXT),
)
REGISTRATION = st.builds(
    worker.Registration,
    worker_id=TEXT,
    incarnation=TEXT,
    role=st.sampled_from(worker.Role),
    model=TEXT,
    address=TEXT,
    http_address=TEXT,
    namespace=BYTES,
    fingerprint=BYTES,
    secret_check=BYTES,
    page_tokens=U32,
    num_pages=U32,
    num_rows=U32,
    max_tokens_total=U32,
    vocab_size=U32,
    eos_token_ids=tuples(U32),
    prefill_mode=TEXT,
    transports=tuples(TEXT),
    domain=TEXT,
    group_id=TEXT,
    dp_rank=U32,
    dp_size=U32,
    tp_size=U32,
    replay_tokens=U32,
)
LOAD = st.builds(
    worker.Load,
    state=st.sampled_from(State),
    pages_total=U32,
    pages_free=U32,
    pages_evictable=U32,
    rows_total=U32,
    rows_used=U32,
    waiting_requests=U32,
    waiting_tokens=U64,
    running_requests=U32,
    step_ms=NUMBER,
    prefill_tokens_per_s=NUMBER,
    leases=U32,
    open_ops=U32,
    unproven_pages=U32,
    kv_backlog_bytes=U64,
    kv_bytes_per_s=NUMBER,
)
BATCH = st.builds(
    worker.KvEventBatch,
    sequence=U64,
    events=tuples(st.builds(worker.KvEvent, kind=TEXT, hashes=tuples(S64), parent=S64, medium=TEXT)),
)
SNAPSHOT = st.builds(worker.KvSnapshot, incarnation=TEXT, sequence=U64, hashes=tuples(S64))

PAIRS = {
    "gateway frame": (
        FROM_GATEWAY,
        convert_stream.gateway_frame_to_proto,
        generate_pb2.GatewayFrame,
        convert_stream.gateway_frame_from_proto,
    ),
    "step frame": (
        FRAME,
        convert_stream.step_frame_to_proto,
        generate_pb2.StepFrame,
        convert_stream.step_frame_from_proto,
    ),
    "from destination": (
        FROM_D,
        convert_handover.from_destination_to_proto,
        kv_source_pb2.FromDestination,
        convert_handover.from_destination_from_proto,
    ),
    "from source": (
        FROM_P,
        convert_handover.from_source_to_proto,
        kv_source_pb2.FromSource,
        convert_handover.from_source_from_proto,
    ),
    "registration": (
        REGISTRATION,
        convert_worker.registration_to_proto,
        membership_pb2.Register,
        convert_worker.registration_from_proto,
    ),
    "load": (LOAD, convert_request.load_to_proto, types_pb2.Load, convert_request.load_from_proto),
    "events": (BATCH, convert_worker.events_to_proto, membership_pb2.KvEvents, convert_worker.events_from_proto),
    "snapshot": (
        SNAPSHOT,
        convert_worker.snapshot_to_proto,
        membership_pb2.SnapshotReply,
        convert_worker.snapshot_from_proto,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_struct_comes_back_equal_through_bytes(name, data):
    strategy, encode, message, decode = PAIRS[name]
    struct = data.draw(strategy)
    assert decode(message.FromString(encode(struct).SerializeToString())) == struct


def fields_reached(message, seen=None):
    """All message types that a proto message can hold, itself included."""
    seen = set() if seen is None else seen
    if message.full_name not in seen:
        seen.add(message.full_name)
        for field in message.fields:
            if field.message_type is not None:
                fields_reached(field.message_type, seen)
    return seen


PARTS = {
    "tandem.v1.GatewayFrame.part",
    "tandem.v1.FromDestination.part",
    *(f"tandem.v1.PixelPart.{name}" for name in ("key", "item", "pixels")),
    "tandem.v1.GatewayFrame.batch",
    "tandem.v1.GatewayFrames.frames",
}
"""Written and read by `core.rpc.pixels` and `core.rpc.generate`, below the conversions."""


@pytest.mark.parametrize("name", PAIRS)
def test_no_field_of_the_wire_is_forgotten(name):
    """Some struct of the strategy sets every field: a field that no conversion writes would stay unset for ever."""
    strategy, encode, message, _decode = PAIRS[name]
    written: set[str] = set()

    @settings(max_examples=300, derandomize=True, deadline=None)
    @given(strategy)
    def collect(struct):
        note(encode(struct))

    def note(proto):
        for field, value in proto.ListFields():
            written.add(field.full_name)
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            for inner in value if field.is_repeated else [value]:
                note(inner)

    collect()
    pool = message.DESCRIPTOR.file.pool
    wanted = {
        field.full_name
        for full_name in fields_reached(message.DESCRIPTOR)
        if not pool.FindMessageTypeByName(full_name).GetOptions().map_entry
        for field in pool.FindMessageTypeByName(full_name).fields
    }
    assert wanted - written - PARTS == set()


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_step_frames_take_numpy_arrays_of_any_integer_type(dtype):
    frame = stream.StepFrame(
        sequence=1,
        handles=np.array([1, 2], dtype),
        positions=np.array([0, 9], dtype),
        counts=np.array([1, 2], dtype),
        tokens=np.array([7, 8, 9], dtype),
    )
    back = convert_stream.step_frame_from_proto(convert_stream.step_frame_to_proto(frame))
    assert (back.handles, back.positions, back.counts, back.tokens) == ([1, 2], [0, 9], [1, 2], [7, 8, 9])


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (convert_stream.gateway_frame_from_proto, generate_pb2.GatewayFrame()),
        (convert_stream.step_frame_from_proto, generate_pb2.StepFrame(records=[generate_pb2.Record(handle=1)])),
        (convert_handover.from_destination_from_proto, kv_source_pb2.FromDestination(transfer="t")),
        (convert_handover.from_source_from_proto, kv_source_pb2.FromSource(transfer="t")),
        pytest.param(
            convert_handover.from_source_from_proto,
            kv_source_pb2.FromSource(chunk_ready=kv_source_pb2.ChunkReady(pages=[1, 2], epochs=[1])),
            id="uneven chunk",
        ),
        (convert_worker.registration_from_proto, membership_pb2.Register(role="cook")),
        (convert_request.load_from_proto, types_pb2.Load(state="asleep")),
    ],
)
def test_what_a_struct_cannot_hold_is_a_bad_request(decode, message):
    with pytest.raises(BadRequest):
        decode(message)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(sorted(PAIRS)))
def test_any_bytes_that_parse_decode_or_are_refused(data, name):
    _strategy, _encode, message, decode = PAIRS[name]
    try:
        proto = message.FromString(data)
    except Exception:
        return
    with contextlib.suppress(BadRequest):
        assert isinstance(decode(proto), msgspec.Struct)
