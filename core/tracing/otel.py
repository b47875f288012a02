"""Spans through OpenTelemetry's SDK to an OTLP/HTTP collector. Imported only if tracing is configured."""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.tracing.api import Span, TracingSection, Value

_PROPAGATOR = TraceContextTextMapPropagator()
_HEADER = "traceparent"
EXPORT_TIMEOUT_S = 2.0


class OtelSpan:
    """One recording span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get(_HEADER, "")
        self._has_ended = False

    def note(self, event: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Add an event."""
        self._span.add_event(event, dict(attributes or {}))

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "") -> None:
        """End and queue for export."""
        if self._has_ended:
            return
        self._has_ended = True
        self._span.set_attributes(dict(attributes or {}))
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class OtelTracer:
    """Exports in batches on a thread of its own; spans that find no room are dropped, requests never wait."""

    def __init__(self, section: TracingSection, *, service: str, instance: str) -> None:
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        sampler = ParentBased(TraceIdRatioBased(section.sample_share))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=section.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("tandem")

    def start(
        self, name: str, *, parent: str = "", attributes: Mapping[str, Value] | None = None, is_server: bool = False
    ) -> Span:
        """Start a span now."""
        context = _PROPAGATOR.extract({_HEADER: parent}) if parent else None
        kind = trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL
        return OtelSpan(self._tracer.start_span(name, context, kind, dict(attributes or {})))

    def close(self) -> None:
        """Export what is left."""
        self._provider.force_flush(int(EXPORT_TIMEOUT_S * 1000))
        self._provider.shutdown()
