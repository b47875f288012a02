"""The vocabulary of a request: what is asked (frozen), how it is sampled, when it stops, how it ended.

Token-in, token-out: no text lives here. Knows no engine, no wire format and no clock.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import BadRequest, NeverFits
from core.ids import PageHash, RequestId

MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 1 << 20
"""Bound on the text of a grammar, the schemas of all tools included."""


class FinishReason(enum.StrEnum):
    """Why a request ended well. Errors are not finish reasons."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen (decision A20). Defaults are OpenAI's; the gateway always mints a seed."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0 is plain argmax, ties to the lowest id."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 is off."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, float] = {}
    seed: Annotated[int, Meta(ge=0)] = 0
    """64-bit key of the counter-based generator."""
    sample_index: Annotated[int, Meta(ge=0)] = 0
    """`s` of A20: which of the n samples of one request this is."""
    num_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    """-1: none; 0: the chosen token's only; k: also the k most likely. Natural log of the raw model's softmax."""
    prompt_logprobs: bool = False


class StopRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When generation ends. Stop strings are the gateway's business, not listed here."""

    max_tokens: Annotated[int, Meta(ge=1)]
    """Bound on output tokens, over all attempts of the request."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Before this many output tokens, stop ids and end-of-text ids are masked."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class MmItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a request (seam f): digest for cache keys, token range, raw pixels or nothing if cached."""

    digest: bytes
    """32 bytes: `core.hashing.image_digest` of size and pixels."""
    start: int
    end: int
    """Its place in `token_ids`: [start, end), laid out as `core.image_plan.ImagePlan.spots` says."""
    height: int = 0
    width: int = 0
    """Of the pixels: multiples of the model's patch."""
    pixels: bytes = b""
    """uint8 [height, width, 3], RGB, row by row; padding included."""


class Floors(msgspec.Struct, frozen=True):
    """Replay floors (A10): which approximation the KV and the tokens of one request are computed with.

    They belong to the request. Whoever computes it again (retraction, retry, resume) uses the same ones, so that equal
    floors over equal tokens give equal pages and equal tokens. All zero: nothing is approximated.
    """

    encoder_floor: int = 0
    """Window rows below this position do not exist for it: the hit's length less the rows that are replayed."""
    decoder_floor: int = 0
    """Prompt tokens before this one run only the layers that keep pages: prompt length less the keep length."""
    hits: tuple[int, ...] = ()
    """Lengths of the cached prefixes that the pages were computed behind, ascending: the last is this request's own
    hit, the ones before are those of the requests that computed the pages of that hit. Where windows are not cached,
    pages from a hit on differ a little from what an undivided computation gives, so this is part of their identity."""

    @property
    def hit_tokens(self) -> int:
        """Length of the request's own hit."""
        return self.hits[-1] if self.hits else 0


NO_FLOORS = Floors()
"""Nothing is approximated."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one client request, as the decode worker owns it."""

    request_id: RequestId
    attempt: int = 0
    """0 for the first try; a retry or resume counts up, and frames of older attempts are dropped."""
    model: str
    token_ids: tuple[int, ...]
    """Prompt, followed on a resume by the output tokens that the client already has."""
    num_prompt_tokens: int
    """`token_ids[num_prompt_tokens:]` are outputs: penalties, min/max tokens and positions see them as such."""
    sampling: SamplingParams
    stop: StopRules
    page_hashes: tuple[PageHash, ...] = ()
    """Chained hashes of the full pages of `token_ids`, made by the gateway with the workers' namespace."""
    timeout_s: float = 600.0
    """Remaining time at the moment of sending; each process makes it a deadline on its own clock."""
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    cache_salt: str = ""
    """Separates cache entries; part of the keyed root."""
    num_cached_tokens: int = -1
    """On a resume: the first attempt's figure, which stays the one reported. -1: not known yet."""
    encoder_floor: int = -1
    decoder_floor: int = -1
    floor_hit_tokens: int = -1
    """Replay floors (A10) belong to the request and travel with it; -1: none set. All 0: compute it exactly."""
    floor_earlier_hits: tuple[int, ...] = ()
    """`Floors.hits` without the last one, which is `floor_hit_tokens`."""
    traceparent: str = ""
    """Trace context of the span that sent it (`core.tracing`); empty: no trace."""
    lora: str = ""
    mm_items: tuple[MmItem, ...] = ()
    grammar: str = ""
    """What the answer must look like, in llguidance's words: a Lark grammar, or a JSON object with the key `grammars`. The
    gateway writes and checks it; workers only follow it. Empty: free text."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that earlier attempts produced."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def floors(self) -> Floors | None:
        """The floors that an earlier attempt (or a client who wants exactness) fixed; None: not chosen yet."""
        if self.encoder_floor < 0 or self.decoder_floor < 0 or self.floor_hit_tokens < 0:
            return None
        hits = (*self.floor_earlier_hits, self.floor_hit_tokens) if self.floor_hit_tokens else ()
        return Floors(encoder_floor=self.encoder_floor, decoder_floor=self.decoder_floor, hits=hits)


def with_floors(request: GenerateRequest, floors: Floors | None) -> GenerateRequest:
    """Return the request with its floors fixed; None changes nothing."""
    if floors is None:
        return request
    return msgspec.structs.replace(
        request,
        encoder_floor=floors.encoder_floor,
        decoder_floor=floors.decoder_floor,
        floor_hit_tokens=floors.hit_tokens,
        floor_earlier_hits=floors.hits[:-1],
    )


def check_request(request: GenerateRequest, vocab_size: int, max_tokens_total: int) -> None:
    """Raise `BadRequest`/`NeverFits` with the field's name if no worker could ever run this.

    `max_tokens_total` bounds prompt + 1 output (context length and pool capacity, the smaller).
    """
    if not request.token_ids or request.num_prompt_tokens < 1:
        raise BadRequest("the prompt is empty; send at least one token", param="prompt")
    if request.num_prompt_tokens > len(request.token_ids):
        raise BadRequest("num_prompt_tokens is larger than the number of tokens sent", param="num_prompt_tokens")
    low, high = min(request.token_ids), max(request.token_ids)
    if low < 0 or high >= vocab_size:
        raise BadRequest(
            f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocab_size - 1}", param="prompt"
        )
    if len(request.token_ids) + 1 > max_tokens_total:
        raise NeverFits(
            f"the prompt has {len(request.token_ids)} tokens; this deployment fits at most {max_tokens_total - 1} before the first output token",
            param="prompt",
        )
    if request.lora:
        raise BadRequest("LoRA adapters are not supported; leave `lora` out", param="lora")
    if len(request.grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"the grammar has more than {MAX_GRAMMAR_CHARS} characters", param="response_format")
    bad = [t for t in (*request.sampling.logit_bias, *request.stop.stop_token_ids) if not 0 <= t < vocab_size]
    if bad:
        raise BadRequest(
            f"token id {bad[0]} is outside the vocabulary 0..{vocab_size - 1}", param="logit_bias or stop_token_ids"
        )
