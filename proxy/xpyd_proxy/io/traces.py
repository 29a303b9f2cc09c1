"""Spans: a request, its legs, and the handoff between them. OpenTelemetry stops at this file, and loads with it."""

import os
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from xpyd_proxy.core.journey import Ending, Journey, Outcome
from xpyd_proxy.core.model import Answer, Headers, Instance, Leg, Role
from xpyd_proxy.core.ports import Engines, Stream, nothing

_CONTEXT: Final = TraceContextTextMapPropagator()  # W3C: traceparent, tracestate
_NAMES: Final = frozenset(name.encode() for name in _CONTEXT.fields)


@dataclass(slots=True)
class _Trip:
    """What one request's legs know of each other. They may run in tasks of their own, which share it."""

    handed_ns: int | None = None  # when the prefill engine had answered, since the epoch


_TRIP: ContextVar[_Trip] = ContextVar("xpyd.trip")


def exporter(endpoint: str) -> SpanExporter:
    """Send spans to a collector by OTLP over HTTP; ``endpoint`` is its base URL, http://host:4318 for example."""
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")


class Traces:
    """The spans of one router; the environment's OTEL_* variables apply as in every OpenTelemetry program."""

    def __init__(self, paths: frozenset[str], processor: SpanProcessor) -> None:
        name = Resource({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "xpyd")})
        self._provider = TracerProvider(resource=Resource.create().merge(name), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("xpyd_proxy")
        self._paths = paths

    @classmethod
    def to(cls, endpoint: str, paths: frozenset[str]) -> "Traces":
        """Send the spans to a collector, in batches and from a thread: no request waits for it."""
        return cls(paths, BatchSpanProcessor(exporter(endpoint)))

    def around(self, engines: Engines) -> "TracedEngines":
        """Have the legs that go to some engines leave spans."""
        return TracedEngines(engines, self)

    def close(self) -> None:
        """Send what is left; may take seconds."""
        self._provider.shutdown()

    @contextmanager
    def request(self, journey: Journey, path: str, headers: Headers) -> Generator[Callable[[Outcome], None]]:
        """Open the span of a request, under the client's own if it has one; tell what is entered how it ended."""
        parent = _CONTEXT.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})
        name = f"POST {path}" if path in self._paths else "request"
        attributes = {"url.path": path, "xpyd.request_id": journey.request_id}
        trip = _TRIP.set(_Trip())
        try:
            with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, attributes) as span:
                yield lambda outcome: _finish(span, journey, outcome)
        finally:
            _TRIP.reset(trip)

    def leg(self, instance: Instance) -> Span:
        """Open the span of a leg; not as the current one, for a stream may end in another task than it began."""
        attributes = {"xpyd.instance": instance.id, "xpyd.role": instance.role}
        return self._tracer.start_span(f"{instance.role} leg", kind=SpanKind.CLIENT, attributes=attributes)

    def handoff(self, start_ns: int) -> None:
        """Show the time between a prefill engine's answer and now."""
        self._tracer.start_span("handoff", start_time=start_ns).end()


class TracedEngines:
    """Engines whose legs leave spans, and which are told of them: their own spans join ours."""

    def __init__(self, engines: Engines, traces: Traces) -> None:
        self._engines = engines
        self._traces = traces

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer; raises what the engines raise."""
        with _following(self._traces.leg(leg.instance)) as span:
            answer = await self._engines.ask(_told(leg, span), timeout_s=timeout_s)
            _answered(span, answer.status)
        if leg.instance.role is Role.PREFILL and (trip := _TRIP.get(None)) is not None:
            trip.handed_ns = time.time_ns()
        return answer

    @asynccontextmanager
    async def stream(self, leg: Leg, *, sent: Callable[[], None] = nothing) -> AsyncGenerator[Stream]:
        """Post, and wait for the head; raises what the engines raise."""
        trip = _TRIP.get(None)
        if trip is not None and trip.handed_ns is not None:
            self._traces.handoff(trip.handed_ns)
        with _following(self._traces.leg(leg.instance)) as span:
            async with self._engines.stream(_told(leg, span), sent=sent) as stream:
                _answered(span, stream.status)
                yield stream

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> Answer:
        """Get the engine's list of models: no part of a request, and so no span."""
        return await self._engines.models(instance, headers, bare=bare)


@contextmanager
def _following(span: Span) -> Generator[Span]:
    try:
        yield span
    except Exception as exc:  # whatever it is, it is only noted, and goes on
        span.set_status(StatusCode.ERROR, str(exc))
        raise
    finally:
        span.end()


def _answered(span: Span, status: int) -> None:
    span.add_event("answered")
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_status(StatusCode.ERROR)


def _finish(span: Span, journey: Journey, outcome: Outcome) -> None:
    ending = outcome.ending(journey)
    span.set_attribute("http.response.status_code", outcome.status)
    span.set_attribute("xpyd.ending", ending)
    span.set_attribute("xpyd.retries", len(journey.retries))
    if journey.route:
        span.set_attribute("xpyd.route", journey.route)
    if ending in (Ending.SERVER, Ending.FAULTY):
        span.set_status(StatusCode.ERROR, journey.fault)


def _told(leg: Leg, span: Span) -> Leg:
    """Name the leg's span to the engine in place of the client's."""
    carrier: dict[str, str] = {}
    _CONTEXT.inject(carrier, set_span_in_context(span))
    others = tuple(header for header in leg.headers if header[0] not in _NAMES)
    return replace(leg, headers=(*others, *((name.encode(), value.encode()) for name, value in carrier.items())))
