"""Spans, as an exporter gets them."""

import asyncio
import itertools

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from support.scripted import Scripted, call, good_decode, good_prefill, never, pulled_prefill, router_of, until
from xpyd_proxy.core.journey import Journey, Outcome
from xpyd_proxy.core.model import RequestId
from xpyd_proxy.errors import EngineError
from xpyd_proxy.io.traces import Traces

PATH = "/v1/completions"
CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = ((b"traceparent", CLIENTS.encode()),)


class Spans:
    """Traces into memory, and what has arrived there."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(frozenset({PATH}), SimpleSpanProcessor(self.exporter))

    def __getitem__(self, name):
        (span,) = [span for span in self.all if span.name == name]
        return span

    @property
    def all(self):
        return self.exporter.get_finished_spans()


@pytest.fixture
def spans():
    spans = Spans()
    yield spans
    spans.traces.close()


async def served(spans, engines, *, headers=HEADERS, **options):
    """Serve one request to its end; return its journey."""
    client = await router_of(engines, spans=spans.traces, **options).serve(call(headers=headers))
    return client.journey


def parent(header):
    """The span that a leg's traceparent names, and its trace."""
    _, trace, span, flags = header.decode().split("-")
    assert flags == "01"
    return int(trace, 16), int(span, 16)


async def test_a_request_is_a_tree_of_spans_that_hangs_on_the_clients(spans):
    """Router, engines and client meet in one trace."""
    engines = Scripted(pulled_prefill, good_decode)
    await served(spans, engines)

    request = spans[f"POST {PATH}"]
    assert request.parent.span_id == 0xB7AD6B7169203331
    assert request.kind is SpanKind.SERVER
    assert {span.context.trace_id for span in spans.all} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert {span.name for span in spans.all} == {request.name, "prefill leg", "handoff", "decode leg"}
    assert {span.parent.span_id for span in spans.all if span is not request} == {request.context.span_id}
    assert spans["prefill leg"].end_time <= spans["handoff"].end_time <= spans["decode leg"].end_time
    assert spans["handoff"].start_time >= spans["prefill leg"].start_time


async def test_an_engine_is_told_of_its_own_leg_and_not_of_the_clients_span(spans):
    """Its spans hang under the leg that caused them."""
    engines = Scripted(pulled_prefill, good_decode)
    await served(spans, engines, headers=(*HEADERS, (b"tracestate", b"a=b")))

    for leg, name in zip(engines.legs, ("prefill leg", "decode leg"), strict=True):
        told = [value for header, value in leg.headers if header == b"traceparent"]
        assert [parent(one) for one in told] == [(spans[name].context.trace_id, spans[name].context.span_id)]
        assert (b"tracestate", b"a=b") in leg.headers


async def test_legs_that_go_out_together_have_no_handoff(spans):
    """In push nothing waits between them."""
    decoding = asyncio.Event()

    async def prefill(leg):
        if leg is not engines.legs[0]:  # the first one teaches the router where the engine is
            decoding.clear()
            await decoding.wait()
        return await good_prefill(leg)

    async def decode(leg):
        decoding.set()
        return await good_decode(leg)

    engines = Scripted(prefill, decode)
    router = router_of(engines, spans=spans.traces)
    for name in "ab":
        await router.serve(name=name)

    first, second = [span for span in spans.all if span.name.startswith("POST")]
    of_second = sorted(span.name for span in spans.all if span.context.trace_id == second.context.trace_id)
    assert of_second == [f"POST {PATH}", "decode leg", "prefill leg"]
    assert "handoff" in [span.name for span in spans.all if span.context.trace_id == first.context.trace_id]
    assert second.attributes["xpyd.route"] == "push"


async def test_a_leg_that_fails_is_a_span_that_failed(spans):
    """With the reason, and the next try beside it."""
    turn = itertools.count()

    async def broken_once(leg):
        if next(turn) == 0:
            raise EngineError("decode-0 broke off")
        return await good_decode(leg)

    journey = await served(spans, Scripted(pulled_prefill, broken_once))

    bad, good = [span for span in spans.all if span.name == "decode leg"]
    assert (bad.status.status_code, bad.status.description) == (StatusCode.ERROR, "decode-0 broke off")
    assert good.status.status_code is StatusCode.UNSET
    assert good.attributes["xpyd.instance"] == "decode-0"
    assert spans[f"POST {PATH}"].attributes["xpyd.retries"] == len(journey.retries) == 1


@pytest.mark.parametrize(("status", "bad"), [(200, False), (404, False), (499, False), (502, True)])
def test_the_span_of_a_request_says_how_it_ended(spans, status, bad):
    """A client's mistake is no error of the router."""
    spans.traces.request(Journey(RequestId("r")), "/v1/odd/17", ()).end(Outcome("/v1/odd/17", status, 0.1))

    span = spans["request"]  # names are few; the path is an attribute
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["xpyd.request_id"] == "r"
    assert (span.status.status_code is StatusCode.ERROR) is bad
    assert span.resource.attributes["service.name"] == "xpyd"
    assert span.parent is None


@pytest.mark.parametrize("traceparent", [b"", b"00-odd", b"\xff\xfe", CLIENTS.encode() + b"-x"])
def test_an_odd_traceparent_starts_a_trace_of_its_own(spans, traceparent):
    """It comes from a client, who may write anything."""
    headers = ((b"traceparent", traceparent),)
    spans.traces.request(Journey(RequestId("r")), PATH, headers).end(Outcome(PATH, 200, 0.1))

    assert spans[f"POST {PATH}"].parent is None


async def test_a_trace_that_the_client_does_not_sample_is_not_sampled(spans):
    """The engines are told the same."""
    engines = Scripted(pulled_prefill, good_decode)
    await served(spans, engines, headers=((b"traceparent", CLIENTS.encode()[:-1] + b"0"),))

    assert not spans.all
    assert all(dict(leg.headers)[b"traceparent"].endswith(b"-00") for leg in engines.legs)


async def test_a_leg_that_a_client_has_left_is_a_span_that_has_ended(spans):
    """It is nobody's failure; and nothing of the trace is missing."""
    engines = Scripted(pulled_prefill, never)
    client = router_of(engines, spans=spans.traces).start(call(headers=HEADERS))
    await until(lambda: len(engines.legs) == 2)
    client.hang_up()

    assert sorted(span.name for span in spans.all) == [f"POST {PATH}", "decode leg", "handoff", "prefill leg"]
    assert spans["decode leg"].status.status_code is StatusCode.UNSET
    assert spans[f"POST {PATH}"].attributes["http.response.status_code"] == 499
