"""OpenTelemetry spans of requests: one for each prompt, made when its last output comes.

Names and attributes are those of vLLM and of OpenTelemetry's conventions for generative models. Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from octavo.core.outputs import RequestMetrics, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_EXPORT_TIMEOUT_S = 5.0


def open_tracer(endpoint: str | None) -> Tracer | None:
    """Return a tracer that sends to a collector's URL for traces (OTLP over HTTP); None without one.

    Raises ConfigError without the extra `otel`.
    """
    if endpoint is None:
        return None
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError("otlp_traces_endpoint needs the extra otel: pip install 'octavo[otel]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))


class Tracer:
    """Sends spans in a thread of its own; spans that it cannot send in time are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, output: RequestOutput, params: SamplingParams, model: str, fields: Mapping[bytes, bytes]) -> None:
        """Record a request that has ended. fields: the headers, whose `traceparent` is the parent of its span."""
        metrics = output.metrics
        if metrics is None:
            return
        headers = {
            name.decode(): fields[name].decode("latin-1") for name in (b"traceparent", b"tracestate") if name in fields
        }
        since_epoch_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            start_time=_ns(metrics.arrival_time + since_epoch_s),
            attributes=_attributes(output, params, model) | _latencies(metrics),
        )
        for at, event in metrics.timeline:
            span.add_event(event, timestamp=_ns(at + since_epoch_s))
        if output.error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, output.error.code))
        ended = time.monotonic() if metrics.finished_time is None else metrics.finished_time
        span.end(end_time=_ns(ended + since_epoch_s))

    def close(self) -> None:
        """Send the remaining spans; takes some seconds at most."""
        self._provider.shutdown()


def _attributes(output: RequestOutput, params: SamplingParams, model: str) -> dict[str, Any]:
    return {
        "gen_ai.response.model": model,
        "gen_ai.request.id": output.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        **({} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens}),
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": output.num_generated_tokens,
        "octavo.usage.cached_tokens": output.num_cached_tokens,
        "octavo.num_preemptions": 0 if output.metrics is None else output.metrics.num_preemptions,
    }


def _latencies(metrics: RequestMetrics) -> dict[str, float]:
    """Return the latencies of a request in seconds, without those of phases that it did not reach."""
    arrived, began, ended = metrics.arrival_time, metrics.first_scheduled_time, metrics.finished_time
    first, last = metrics.first_token_time, metrics.last_token_time
    spans = {
        "time_in_queue": (arrived, began),
        "time_to_first_token": (arrived, first),
        "e2e": (arrived, ended),
        "time_in_model_prefill": (began, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (began, last),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in spans.items()
        if start is not None and end is not None
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
