"""Spans of requests: their parent, times and attributes, and a collector that gets them or is not there."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.config.server_args import ServerArgs
from octavo.core.outputs import CompletionOutput, RequestError, RequestMetrics, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError
from octavo.server import tracing
from octavo.server.tracing import Tracer
from tests.fakes.http_server import serving
from tests.server.raw import ask

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FIELDS = {b"traceparent": f"00-{TRACE}-{PARENT}-01".encode(), b"host": b"x"}


def output_of(metrics: RequestMetrics, error: RequestError | None = None) -> RequestOutput:
    outputs = [CompletionOutput(index=0, text="ab", token_ids=[1, 2])]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[5, 6, 7],
        outputs=outputs,
        finished=True,
        num_cached_tokens=2,
        num_generated_tokens=2,
        metrics=metrics,
        error=error,
    )


def span_of(output: RequestOutput) -> Any:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter)
    tracer.record(output, SamplingParams(max_tokens=4, temperature=0.5), "m", FIELDS)
    tracer.close()
    [span] = exporter.get_finished_spans()
    return span


def test_a_span_has_the_clients_parent_and_the_times_of_the_request() -> None:
    now = time.monotonic()
    metrics = RequestMetrics.begin(now - 10)
    metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time = now - 8, now - 5, now - 1
    metrics.end(now - 1, "finished")
    span = span_of(output_of(metrics))
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(9)
    assert abs(span.end_time / 1e9 - (time.time() - 1)) < 5
    assert [event.name for event in span.events] == ["queued", "finished"]
    latencies = {"time_in_queue": 2, "time_to_first_token": 5, "e2e": 9}
    latencies |= {
        f"time_in_model_{part}": seconds for part, seconds in (("prefill", 3), ("decode", 4), ("inference", 7))
    }
    for name, seconds in latencies.items():
        assert span.attributes[f"gen_ai.latency.{name}"] == pytest.approx(seconds), name
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert span.attributes["gen_ai.usage.completion_tokens"] == 2
    assert span.attributes["gen_ai.request.max_tokens"] == 4
    assert span.status.is_unset


def test_a_request_that_was_refused_is_an_error_without_times_of_the_model() -> None:
    metrics = RequestMetrics.begin(time.monotonic())
    span = span_of(output_of(metrics, RequestError("full", "prompt", "queue_full", is_client_error=False)))
    assert (span.status.is_ok, span.status.description) == (False, "queue_full")
    assert not any(name.startswith("gen_ai.latency.") for name in span.attributes)


def test_a_server_sends_spans_to_its_collector(start_server: Any) -> None:
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

    with serving(Collector) as port:
        server = start_server(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
        headers = {"traceparent": FIELDS[b"traceparent"].decode()}
        for stream in (False, True):
            body = {"prompt": ["ab", "cd"], "max_tokens": 3, "stream": stream}
            assert ask(server.url, "/v1/completions", body, headers=headers).status == 200
        server.stop()
    spans = [
        span
        for each in received
        for resource in each.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == 4
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_a_collector_that_is_not_there_keeps_no_server_from_ending(start_server: Any) -> None:
    server = start_server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    assert ask(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    assert server.stop() == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'localhost:4318'; give a URL"):
        ServerArgs(otlp_traces_endpoint="localhost:4318")
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        tracing.open_tracer("http://localhost/v1/traces")
    assert tracing.open_tracer(None) is None
