"""One request as one trace over gateway, decode worker and prefill worker, exported to a collector in this process."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from core.errors import ConfigError
from core.tracing.api import NullTracer, TracingSection, read_traceparent
from core.tracing.factory import open_tracer
from tests.fakes.live_cluster import running_cluster, wait_for

pytestmark = [pytest.mark.cluster]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP; `spans` holds (service, span)."""

    def __init__(self):
        self.spans = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        spans.extend((names["service.name"], span) for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def of_trace(collector, trace):
    return {service: span for service, span in list(collector.spans) if span.trace_id.hex() == trace}


def test_a_request_is_one_trace_over_all_processes(tmp_path, collector):
    flags = []
    for name in ("gateway:tracing", "prefill:worker.tracing", "decode:worker.tracing"):
        flags += ["--set", f"{name}.endpoint={collector.url}"]
    with running_cluster(tmp_path, *flags) as cluster:
        body = {"model": "scripted", "prompt": "a b c d e f g h", "max_tokens": 4, "temperature": 0}
        url = f"{cluster.base_url}/v1/completions"
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        wait_for(lambda: len(of_trace(collector, TRACE)) == 3, 60, "the spans did not arrive")
        spans = of_trace(collector, TRACE)
        assert spans["gateway"].parent_span_id.hex() == PARENT
        assert spans["decode"].parent_span_id == spans["gateway"].span_id
        assert spans["prefill"].parent_span_id == spans["decode"].span_id
        events = [event.name for event in spans["decode"].events]
        assert events == ["booking", "pulling", "first token", "landed", "running"]
        for inner, outer in (("decode", "gateway"), ("prefill", "decode")):
            assert spans[outer].start_time_unix_nano <= spans[inner].start_time_unix_nano
            assert spans[inner].end_time_unix_nano <= spans[outer].end_time_unix_nano
        # Without a context of its own a request begins a trace; a malformed one is no context.
        httpx.post(url, json=body, headers={"traceparent": "00-junk"}, timeout=60)
        wait_for(lambda: len(collector.spans) >= 6, 60, "the spans of the second request did not arrive")
        traces = {span.trace_id.hex() for _, span in collector.spans}
        assert len(traces) == 2


def test_a_malformed_context_is_no_context():
    good = f"00-{TRACE}-{PARENT}-01"
    assert read_traceparent(good) == good
    for bad in ("", "00-junk", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", good + "\n", good.upper()):
        assert read_traceparent(bad) == ""


def test_without_an_exporter_a_context_is_passed_on_unchanged():
    tracer = open_tracer(TracingSection(), service="decode", instance="d1")
    assert isinstance(tracer, NullTracer)
    parent = f"00-{TRACE}-{PARENT}-01"
    assert tracer.start("decode", parent=parent).traceparent == parent


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "core.tracing.otel", None)
    with pytest.raises(ConfigError, match=r"tandem-serving\[otel\]"):
        open_tracer(TracingSection(endpoint="http://127.0.0.1:1"), service="x", instance="x")
