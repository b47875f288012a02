"""Images of a prompt as the engine sees them: what a model takes, whether a request's images fit it, where they lie.

Knows no pixels' meaning and no encoder. The digest of an image is the gateway's word: it names cache entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import BadRequest
from core.image_plan import ImageRules, plan_size
from core.request import GenerateRequest, MmItem

DIGEST_BYTES = 32
Spans = Sequence[tuple[int, int]]
"""Positions [start, end) of the images of one prompt, ascending."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a model that takes images says of them."""

    token_id: int
    """The id at every position of an image."""
    rules: ImageRules


def spans_of(request: GenerateRequest) -> Spans:
    """Return where the images of a request lie."""
    return [(item.start, item.end) for item in request.mm_items]


def check_images(request: GenerateRequest, facts: ImageFacts | None) -> None:
    """Raise `BadRequest` unless the images lie in the prompt one behind the other, whole, on nothing but their token.

    The token's id anywhere else in the prompt is refused too: it would stand for an image that is not there.
    """
    if facts is None:
        if request.mm_items:
            raise BadRequest("this model takes no images", param="mm_items")
        return
    at = covered = 0
    for item in request.mm_items:
        _check_item(item, facts.rules)
        if item.start < at or item.end > request.num_prompt_tokens:
            raise BadRequest(
                f"an image at tokens {item.start} to {item.end} overlaps or leaves the prompt", param="mm_items"
            )
        at = item.end
        covered += item.end - item.start
        if request.token_ids[item.start : item.end].count(facts.token_id) != item.end - item.start:
            raise BadRequest(f"an image at tokens {item.start} to {item.end} lies on other tokens", param="mm_items")
    if request.token_ids[: request.num_prompt_tokens].count(facts.token_id) != covered:
        raise BadRequest(f"token {facts.token_id} stands for an image, and there is none in its place", param="prompt")


def _check_item(item: MmItem, rules: ImageRules) -> None:
    plan = plan_size(item.width, item.height, rules)
    if plan.num_tokens > rules.max_tokens:
        raise BadRequest(f"an image of {plan.num_tokens} tokens is more than {rules.max_tokens}", param="mm_items")
    if item.end - item.start != plan.num_tokens:
        raise BadRequest(
            f"an image of {item.width}x{item.height} pixels takes {plan.num_tokens} tokens, not {item.end - item.start}",
            param="mm_items",
        )
    if len(item.pixels) != plan.num_bytes:
        raise BadRequest(f"an image has {len(item.pixels)} bytes of pixels, not {plan.num_bytes}", param="mm_items")
    if len(item.digest) != DIGEST_BYTES:
        raise BadRequest(f"an image's digest has {len(item.digest)} bytes, not {DIGEST_BYTES}", param="mm_items")
