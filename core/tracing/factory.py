"""Which tracer a process gets."""

from core.errors import ConfigError
from core.tracing.api import NullTracer, Tracer, TracingSection


def open_tracer(section: TracingSection, *, service: str, instance: str) -> Tracer:
    """Return a tracer for this configuration; raises `ConfigError` if the exporter is not installed."""
    if not section.endpoint:
        return NullTracer()
    try:
        from core.tracing.otel import OtelTracer
    except ImportError as error:
        raise ConfigError(
            f"tracing needs {error.name}; install the extra: pip install 'tandem-serving[otel]'", param="tracing"
        ) from error
    return OtelTracer(section, service=service, instance=instance)
