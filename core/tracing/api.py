"""Spans of one request across processes, in W3C's terms: a `traceparent` comes in, each span makes the next one.

Callers start and end spans by hand, because a request's life crosses tasks, threads and processes. `NullTracer` passes
on what it was given, so that a process without an exporter breaks no trace.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool


class TracingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[tracing]`: where spans go."""

    endpoint: str = ""
    """URL of an OTLP/HTTP collector, e.g. ``http://127.0.0.1:4318/v1/traces``; empty: no spans. Needs the extra `otel`."""
    sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Of the requests that bring no traceparent; one that does has decided already."""


class Span(Protocol):
    """One stretch of a request's life in one process."""

    traceparent: str
    """What the next process is given; empty: no trace."""

    def note(self, event: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Mark a moment inside the span."""
        ...

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "") -> None:
        """End the span, badly if `error` says how; idempotent."""
        ...


class Tracer(Protocol):
    """Makes spans. Any thread."""

    def start(
        self, name: str, *, parent: str = "", attributes: Mapping[str, Value] | None = None, is_server: bool = False
    ) -> Span:
        """Start a span below the one that `parent` names, or a trace of its own if there is none."""
        ...

    def close(self) -> None:
        """Send what is left, briefly."""
        ...


class NullSpan:
    """A span of nothing."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def note(self, event: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Do nothing."""

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "") -> None:
        """Do nothing."""


class NullTracer:
    """For processes without an exporter."""

    def start(
        self, name: str, *, parent: str = "", attributes: Mapping[str, Value] | None = None, is_server: bool = False
    ) -> Span:
        """Return a span that only carries the parent on."""
        del name, attributes, is_server
        return NullSpan(parent)

    def close(self) -> None:
        """Do nothing."""


def read_traceparent(value: str) -> str:
    """Return a well-formed traceparent (version 00), or nothing."""
    return value if _TRACEPARENT.fullmatch(value) else ""


current_traceparent: ContextVar[str] = ContextVar("tandem_traceparent", default="")
"""Of the HTTP request that this task works for."""
