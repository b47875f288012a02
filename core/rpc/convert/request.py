"""Requests, log-probabilities, load and errors: proto <-> structs. Total functions; nothing is validated twice.

A request's limits are the engine's business (`core.request.check_request`); here only what a struct cannot hold is
refused. Token ids and logits travel as numbers of protobuf's own types: a value outside them is our bug (ValueError).
"""

from core.errors import BadRequest
from core.handover import TokenLogprobs
from core.ids import PageHash, RequestId
from core.lifecycle import State
from core.request import Floors, GenerateRequest, MmItem, SamplingParams, StopRules
from core.worker import Load
from tandem.v1 import types_pb2 as pb


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Encode one request."""
    message = pb.GenerateRequest()
    write_request(message, request)
    return message


def write_request(message: pb.GenerateRequest, request: GenerateRequest) -> None:
    """Fill an empty message, where it is: giving a parent its parts copies all of them, tokens included."""
    message.request_id = request.request_id
    message.attempt = request.attempt
    message.model = request.model
    message.token_ids.extend(request.token_ids)
    message.num_prompt_tokens = request.num_prompt_tokens
    _write_sampling(message.sampling, request.sampling)
    _write_stop(message.stop, request.stop)
    message.page_hashes.extend(request.page_hashes)
    message.timeout_s = request.timeout_s
    message.priority = request.priority
    message.tenant = request.tenant
    message.cache_salt = request.cache_salt
    message.num_cached_tokens = request.num_cached_tokens
    message.encoder_floor = request.encoder_floor
    message.decoder_floor = request.decoder_floor
    message.floor_hit_tokens = request.floor_hit_tokens
    message.floor_earlier_hits.extend(request.floor_earlier_hits)
    message.lora = request.lora
    message.traceparent = request.traceparent
    for item in request.mm_items:
        message.mm_items.add(
            digest=item.digest,
            start=item.start,
            end=item.end,
            height=item.height,
            width=item.width,
            pixels=item.pixels,
        )
    message.grammar = request.grammar


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Decode one request."""
    return GenerateRequest(
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        model=message.model,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        stop=stop_from_proto(message.stop),
        page_hashes=tuple(PageHash(value) for value in message.page_hashes),
        timeout_s=message.timeout_s,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        num_cached_tokens=message.num_cached_tokens,
        encoder_floor=message.encoder_floor,
        decoder_floor=message.decoder_floor,
        floor_hit_tokens=message.floor_hit_tokens,
        floor_earlier_hits=tuple(message.floor_earlier_hits),
        lora=message.lora,
        traceparent=message.traceparent,
        mm_items=tuple(
            MmItem(
                digest=item.digest,
                start=item.start,
                end=item.end,
                height=item.height,
                width=item.width,
                pixels=item.pixels,
            )
            for item in message.mm_items
        ),
        grammar=message.grammar,
    )


def floors_to_proto(floors: Floors) -> pb.Floors:
    """Encode replay floors."""
    return pb.Floors(encoder_floor=floors.encoder_floor, decoder_floor=floors.decoder_floor, hits=floors.hits)


def floors_from_proto(message: pb.Floors) -> Floors:
    """Decode replay floors; an absent message is all zero."""
    return Floors(encoder_floor=message.encoder_floor, decoder_floor=message.decoder_floor, hits=tuple(message.hits))


def _write_sampling(message: pb.SamplingParams, sampling: SamplingParams) -> None:
    """Encode how tokens are chosen; doubles, so nothing is rounded."""
    message.temperature = sampling.temperature
    message.top_k = sampling.top_k
    message.top_p = sampling.top_p
    message.min_p = sampling.min_p
    message.repetition_penalty = sampling.repetition_penalty
    message.presence_penalty = sampling.presence_penalty
    message.frequency_penalty = sampling.frequency_penalty
    message.logit_bias.update(sampling.logit_bias)
    message.seed = sampling.seed
    message.sample_index = sampling.sample_index
    message.num_logprobs = sampling.num_logprobs
    message.prompt_logprobs = sampling.prompt_logprobs


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Decode how tokens are chosen."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        sample_index=message.sample_index,
        num_logprobs=message.num_logprobs,
        prompt_logprobs=message.prompt_logprobs,
    )


def _write_stop(message: pb.StopRules, stop: StopRules) -> None:
    """Encode when generation ends."""
    message.max_tokens = stop.max_tokens
    message.min_tokens = stop.min_tokens
    message.stop_token_ids.extend(stop.stop_token_ids)
    message.ignore_eos = stop.ignore_eos


def stop_from_proto(message: pb.StopRules) -> StopRules:
    """Decode when generation ends."""
    return StopRules(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def logprobs_to_proto(item: TokenLogprobs) -> pb.TokenLogprobs:
    """Encode the log-probabilities of one output position."""
    return pb.TokenLogprobs(
        token=item.token,
        logprob=item.logprob,
        top=[pb.TopLogprob(token=token, logprob=logprob) for token, logprob in item.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Decode the log-probabilities of one output position."""
    return TokenLogprobs(
        token=message.token, logprob=message.logprob, top=tuple((top.token, top.logprob) for top in message.top)
    )


def load_to_proto(load: Load) -> pb.Load:
    """Encode a load report."""
    return pb.Load(
        state=load.state.value,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        pages_evictable=load.pages_evictable,
        rows_total=load.rows_total,
        rows_used=load.rows_used,
        waiting_requests=load.waiting_requests,
        waiting_tokens=load.waiting_tokens,
        running_requests=load.running_requests,
        step_ms=load.step_ms,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        leases=load.leases,
        open_ops=load.open_ops,
        unproven_pages=load.unproven_pages,
        kv_backlog_bytes=load.kv_backlog_bytes,
        kv_bytes_per_s=load.kv_bytes_per_s,
    )


def load_from_proto(message: pb.Load) -> Load:
    """Decode a load report; raises `BadRequest` for a state of another version."""
    return Load(
        state=state_from_text(message.state),
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        pages_evictable=message.pages_evictable,
        rows_total=message.rows_total,
        rows_used=message.rows_used,
        waiting_requests=message.waiting_requests,
        waiting_tokens=message.waiting_tokens,
        running_requests=message.running_requests,
        step_ms=message.step_ms,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        leases=message.leases,
        open_ops=message.open_ops,
        unproven_pages=message.unproven_pages,
        kv_backlog_bytes=message.kv_backlog_bytes,
        kv_bytes_per_s=message.kv_bytes_per_s,
    )


def state_from_text(text: str) -> State:
    """Decode a life-cycle state; raises `BadRequest` for an unknown one."""
    try:
        return State(text)
    except ValueError as error:
        raise BadRequest(f"unknown life-cycle state {text!r}", param="state") from error


def error_to_proto(code: str, message: str, retry_after_s: float) -> pb.Error:
    """Encode an error record; `retry_after_s` 0 is none."""
    return pb.Error(code=code, message=message, retry_after_s=retry_after_s)
