"""Limits and defaults of the HTTP interface. Admission to the cluster is bounded elsewhere."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.text.images import ImageLimits
from gateway.text.template_chat import AnswerParsing


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `api` of the gateway's configuration."""

    max_body_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024 * 1024
    """A longer body is answered with 413; a 128K-token prompt as text is about 0.6 MB, as ids about 1 MB."""
    body_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """A body that has not arrived after this long is answered with 408."""
    request_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Deadline of a request without header `x-deadline-ms`, and the largest that the header may ask for."""
    slow_client_s: Annotated[float, Meta(gt=0)] = 30.0
    """A stream whose client takes nothing for this long is aborted."""
    max_choices: Annotated[int, Meta(ge=1)] = 128
    """Bound on prompts x n of one request."""
    max_stops: Annotated[int, Meta(ge=1)] = 16
    max_stop_chars: Annotated[int, Meta(ge=1)] = 256
    """Bounds on stop strings: their scan costs time on every token."""
    inline_chars: Annotated[int, Meta(ge=0)] = 8192
    """Longer prompts are tokenized on a thread, so that they do not hold up the streams of others."""
    text_threads: Annotated[int, Meta(ge=1)] = 2
    max_waiting_prompts: Annotated[int, Meta(ge=1)] = 256
    """Long prompts that may wait for such a thread; beyond it the answer is 429."""
    keepalive_s: Annotated[float, Meta(ge=0)] = 0.0
    """A stream that says nothing for this long gets a comment (a ping in Anthropic's API). 0: never, as some clients
    take a comment for a broken event."""
    images: ImageLimits = ImageLimits()
    parsing: AnswerParsing = AnswerParsing()
