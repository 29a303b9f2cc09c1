"""Spans of a request, its legs, the handoff between them, and engines' rows.

Only this file imports OpenTelemetry, and it is loaded only if spans are on.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdrelay_proxy.core.model import Headers, Instance, Role
from pdrelay_proxy.core.request_record import RequestOutcome, RequestRecord
from pdrelay_proxy.features.why.engine_spans import HearEnd
from pdrelay_proxy.features.why.request_timeline import Row, router_timeline
from pdrelay_proxy.io.request_path.access_log import fields

_CONTEXT: Final = TraceContextTextMapPropagator()  # W3C Trace Context: traceparent, tracestate
_NAMES: Final = frozenset(name.encode() for name in _CONTEXT.fields)
# fields of the log that spans have under other names
_ELSEWHERE: Final = frozenset({"path", "status", "mode", "retries"})
_BAD: Final = 400  # statuses from here on are errors
_MOST_EVENTS: Final = 64  # of one span, the first ones; OpenTelemetry keeps the last 128
_MOST_NS: Final = 1 << 63  # since the epoch
_MOST_ROWS: Final = 256  # of the engines of one request, the first ones
# It quotes a client's tracestate that is none: as much as a head has room for, at each request.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


class Traces:
    """The spans of one router; the environment's OTEL_* variables apply."""

    def __init__(
        self, paths: frozenset[str], processor: SpanProcessor, ended: HearEnd | None = None
    ) -> None:
        """``ended``: gets each finished request that has a trace, to add engines' rows."""
        name = Resource({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "pdrelay")})
        self._provider = TracerProvider(
            resource=Resource.create().merge(name), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pdrelay_proxy")
        self._paths = paths
        self._ended = ended

    @classmethod
    def to(cls, endpoint: str, paths: frozenset[str], ended: HearEnd) -> "Traces":
        """Return traces that a thread exports in batches to a collector (OTLP over HTTP)."""
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        return cls(paths, BatchSpanProcessor(exporter), ended)

    def close(self) -> None:
        """Export the remaining spans; may take seconds."""
        self._provider.shutdown()

    def request(self, record: RequestRecord, headers: Headers) -> "TracedRequest":
        """Open the span of a request, as a child of the client's if it has one."""
        carrier: dict[str, list[str]] = {}
        for header_name, value in headers:
            if header_name in _NAMES:
                carrier.setdefault(header_name.decode(), []).append(value.decode("latin-1"))
        parent = _CONTEXT.extract(carrier)
        path = record.path
        name = f"POST {path}" if path in self._paths else "request"
        attributes = {"url.path": path, "pdrelay.request_id": record.request_id}
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        return TracedRequest(self._tracer, span, record, self._ended)


class TracedRequest:
    """The span of one request, the parent of its legs' spans."""

    def __init__(
        self,
        tracer: Tracer,
        span: Span,
        record: RequestRecord,
        ended: HearEnd | None,
    ) -> None:
        self._tracer = tracer
        self._ended = ended
        self._legs = dict[str, Context]()  # the last leg of each engine
        self._span = span
        self._context = set_span_in_context(span)
        self._record = record
        self._handed_ns: int | None = None  # when the prefill engine had answered, since the epoch

    def leg(self, instance: Instance, headers: Headers) -> tuple["TracedLeg", Headers]:
        """Open the span of a leg; return it, and headers that carry it to the engine."""
        if instance.role is Role.DECODE and self._handed_ns is not None:
            self._tracer.start_span("handoff", self._context, start_time=self._handed_ns).end()
        attributes = {"pdrelay.instance": instance.id, "pdrelay.role": instance.role}
        span = self._tracer.start_span(
            f"{instance.role} leg", self._context, SpanKind.CLIENT, attributes
        )
        carrier: dict[str, str] = {}
        self._legs[instance.id] = context = set_span_in_context(span)
        _CONTEXT.inject(carrier, context)
        own_headers = tuple(header for header in headers if header[0] not in _NAMES)
        return TracedLeg(span), (
            *own_headers,
            *((name.encode(), value.encode()) for name, value in carrier.items()),
        )

    def handed_over(self) -> None:
        """Begin the handoff, at the prefill engine's answer; the decode leg ends it."""
        self._handed_ns = time.time_ns()

    def end(self) -> None:
        """End the span, with the fields of the request's record."""
        span = self._span
        record = self._record
        outcome = record.outcome
        span.set_attribute("http.response.status_code", record.status)
        for name, value in fields(record).items():
            if value is not None and name not in _ELSEWHERE:
                span.set_attribute(
                    f"pdrelay.{name}", value if isinstance(value, int | float) else str(value)
                )
        span.set_attribute("pdrelay.outcome", outcome)
        span.set_attribute("pdrelay.mode", record.mode)
        span.set_attribute("pdrelay.retries", len(record.retries))
        if outcome in (RequestOutcome.SERVER_ERROR, RequestOutcome.STREAM_ABORTED):
            span.set_status(StatusCode.ERROR, record.error)
        if span.is_recording():  # a sampler may have left it out
            self._add_timeline(time.time_ns())
            if self._ended is not None and self._legs:
                self._ended(record, self._add_engine_rows)
        span.end()

    def _add_timeline(self, now_ns: int) -> None:
        """Add the router's rows of ``pdrelay why`` as events, each at its beginning."""
        record = self._record
        began_ns = now_ns - int(record.duration_s * 1e9)
        for row in router_timeline(record, record.duration_s).rows[:_MOST_EVENTS]:
            attributes: dict[str, str | float] = {
                "pdrelay.where": row.where,
                "pdrelay.duration_ms": row.duration_ms,
            }
            if row.note:
                attributes["pdrelay.note"] = row.note
            self._span.add_event(row.what, attributes, began_ns + int(row.begin_ms * 1e6))

    def _add_engine_rows(self, began_at: float, rows: Sequence[Row]) -> None:
        """Add the engines' rows as spans of their legs.

        ``began_at``: of the request, in seconds since the epoch.
        """
        began_ns = int(began_at * 1e9)
        for row in rows[:_MOST_ROWS]:
            attributes = {"pdrelay.instance": row.where} | (
                {"pdrelay.note": row.note} if row.note else {}
            )
            begin_ns = began_ns + int(row.begin_ms * 1e6)
            end_ns = begin_ns + int(row.duration_ms * 1e6)
            # by an engine's clock; the exporter would drop its whole batch
            if not 0 <= begin_ns <= end_ns < _MOST_NS:
                continue
            under = self._legs.get(row.leg, self._context)
            span = self._tracer.start_span(
                row.what, under, SpanKind.INTERNAL, attributes, start_time=begin_ns
            )
            span.end(end_ns)


class TracedLeg:
    """The span of one leg."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, status: int) -> None:
        """Note the head of the response."""
        self._span.add_event("answered")
        self._span.set_attribute("http.response.status_code", status)
        if status >= _BAD:
            self._span.set_status(StatusCode.ERROR)

    def end(self, error: Exception | None) -> None:
        """End the span; ``error``: why the leg failed."""
        if error is not None:
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()
