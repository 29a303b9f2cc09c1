"""Spans, as an exporter gets them."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.features.why.engine_spans import EngineSpans
from pdrelay_proxy.features.why.feature import WhyFeature
from pdrelay_proxy.features.why.request_timeline import Timeline
from pdrelay_proxy.features.why.traces import Traces
from pdrelay_proxy.settings import KvTransferMode, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import InMemory, sims, until_async

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3, "stream": True}
CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"traceparent": CLIENTS}


class Spans:
    """Traces into memory, and what has arrived there."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.make_traces = partial(Traces, frozenset({PATH}), SimpleSpanProcessor(self.exporter))
        self.traces = self.make_traces()

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


@asynccontextmanager
async def traced_router(spans, engines, mode=KvTransferMode.PULL):
    """A client of a router in front of these engines, whose requests leave spans."""
    settings = replace(Settings(), prefill=("p0:80",), decode=("d0:80",), allowed_hosts=("*",), kv_transfer_mode=mode)
    built = build(
        settings, fabric=InMemory(engines).fabric, make_features=[partial(WhyFeature, make_traces=spans.make_traces)]
    )
    transport = httpx.ASGITransport(built.app)
    async with (
        built.app.router.lifespan_context(built.app),
        httpx.AsyncClient(transport=transport, base_url="http://router") as client,
    ):
        yield client


async def served(spans, engines, *, headers=HEADERS):
    """One request, to the end of its stream."""
    async with traced_router(spans, engines) as client:
        answer = await client.post(PATH, json=BODY, headers=headers)
        assert answer.status_code == 200


def parent(header):
    """The span that a leg's traceparent names, and its trace."""
    _, trace, span, flags = header.split("-")
    assert flags == "01"
    return int(trace, 16), int(span, 16)


async def test_a_request_is_a_tree_of_spans_that_hangs_on_the_clients(spans):
    """Router, engines and client meet in one trace."""
    await served(spans, sims())

    request = spans[f"POST {PATH}"]
    assert request.parent.span_id == 0xB7AD6B7169203331
    assert request.kind is SpanKind.SERVER
    assert {span.context.trace_id for span in spans.all} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert sorted(span.name for span in spans.all) == [request.name, "decode leg", "handoff", "prefill leg"]
    assert {span.parent.span_id for span in spans.all if span is not request} == {request.context.span_id}
    assert {spans[name].kind for name in ("prefill leg", "decode leg")} == {SpanKind.CLIENT}
    assert spans["prefill leg"].end_time <= spans["handoff"].end_time <= spans["decode leg"].end_time
    assert spans["handoff"].start_time >= spans["prefill leg"].start_time
    assert (request.attributes["pdrelay.outcome"], request.attributes["pdrelay.mode"]) == ("ok", "pull")
    times = [request.attributes[f"pdrelay.{name}_ms"] for name in ("prefill", "ttft", "duration")]
    assert 0.0 < times[0] <= times[1] <= times[2]
    assert request.attributes["pdrelay.queue_ms"] == 0.0


async def test_the_span_of_a_request_has_its_timeline_as_events(spans):
    """The rows of pdrelay why, one after the other and without a gap, from the begin to the end of the request."""
    await served(spans, sims())

    request = spans[f"POST {PATH}"]
    rows = [(event.name, event.attributes["pdrelay.where"]) for event in request.events]
    assert rows[-5:] == [
        ("prefill leg", "prefill-0"), ("hand over", "router"), ("decode leg", "decode-0"),
        ("write the first event", "router"), ("stream", "decode-0"),
    ]  # fmt: skip
    ends = [event.timestamp + event.attributes["pdrelay.duration_ms"] * 1e6 for event in request.events]
    begins = [event.timestamp for event in request.events]
    assert begins[1:] == pytest.approx(ends[:-1], abs=2000)  # ns: floats of the epoch
    assert ends[-1] <= request.end_time + 1e6


async def test_what_engines_noted_is_spans_under_their_legs(spans):
    """One trace shows where the time went inside engines, also those that export no spans."""
    engines = sims()
    async with traced_router(spans, engines) as client:
        name = (await client.post(PATH, json=BODY, headers=HEADERS)).headers["x-request-id"]
        leg = spans["prefill leg"]
        at = leg.start_time / 1e9
        steps = [("arrived", 0.0), ("queued", 0.00001), ("considered", 0.00003)]
        engines["p0"].timelines = {name: [{"step": step, "at": at + after, "count": 0} for step, after in steps]}
        await until_async(lambda: "API server" in [span.name for span in spans.all])

    rows = {span.name: span for span in spans.all if span.parent and span.parent.span_id == leg.context.span_id}
    assert {"API server", "wait in the queue"} <= rows.keys()
    assert rows["wait in the queue"].end_time - rows["wait in the queue"].start_time == pytest.approx(20_000, abs=2000)
    assert abs(rows["API server"].start_time - leg.start_time) < 5e6
    assert {span.context.trace_id for span in rows.values()} == {leg.context.trace_id}


async def test_times_that_no_exporter_can_write_are_left_out(spans):
    """OTLP has 64 bits of nanoseconds; its exporter drops all spans of a batch if one has more, other requests' too."""
    engines = sims()
    async with traced_router(spans, engines) as client:
        name = (await client.post(PATH, json=BODY, headers=HEADERS)).headers["x-request-id"]
        at = spans["prefill leg"].start_time / 1e9
        steps = [
            ("arrived", at),
            ("queued", at + 0.00001),
            ("considered", 1e11),
            ("lease_granted", 0),
            ("lease_done", 1),
        ]
        engines["p0"].timelines = {name: [{"step": step, "at": when, "count": 0} for step, when in steps]}
        await until_async(lambda: "API server" in [span.name for span in spans.all])

    assert all(0 <= span.start_time <= span.end_time < 1 << 63 for span in spans.all)


async def test_engines_that_noted_nothing_are_left_alone():
    """Most keep no timelines: two more requests to engines for each traced one would be a load of its own."""
    now = [0.0]
    asked = list[str]()

    async def ask(record, without):
        asked.append(record.request_id)
        return 0.0, Timeline(0.0)

    def over(name):
        record = RequestRecord(RequestId(name), PATH)
        record.prefill = LegRecord("prefill-0")
        return record

    spans = EngineSpans(ask, lambda: now[0], later_s=0.0)
    async with spans.running():
        for name, at, untold in (("first", 0.0, 1), ("soon", 30.0, 1), ("later", 61.0, 2)):
            now[0] = at
            spans.offer(over(name), lambda began_at, rows: None)
            await until_async(lambda untold=untold: spans.outcomes["untold",] == untold)

    assert asked == ["first", "later"]
    assert spans.outcomes["untold",] == 2


async def test_more_traces_than_engines_are_asked_of_are_counted():
    """Nothing piles up behind an engine that is slow to tell."""
    spans = EngineSpans(lambda *_: asyncio.sleep(9, (0.0, Timeline(0.0))), lambda: 0.0)
    record = RequestRecord(RequestId("r"), PATH)
    record.prefill = LegRecord("prefill-0")
    for _ in range(100):
        spans.offer(record, lambda began_at, rows: None)

    assert spans.outcomes["skipped",] == 36


async def test_a_retry_is_an_event_with_its_reason(spans):
    """Where the time went, and why a second engine was asked."""
    engines = sims()
    engines["d0"].inject(SimulatedFault(FaultKind.DROP, times=1))
    await served(spans, engines)

    notes = [
        event.attributes.get("pdrelay.note") for event in spans[f"POST {PATH}"].events if event.name == "decode leg"
    ]
    assert notes == ["failed: bad_response", None]


@pytest.mark.parametrize(("name", "engine"), [("prefill leg", "p0"), ("decode leg", "d0")])
async def test_an_engine_is_told_of_its_own_leg_and_not_of_the_clients_span(spans, name, engine):
    """Its spans hang under the leg that caused them."""
    engines = sims()
    await served(spans, engines, headers=HEADERS | {"tracestate": "a=b"})

    (entry,) = engines[engine].log
    assert parent(entry.headers["traceparent"]) == (spans[name].context.trace_id, spans[name].context.span_id)
    assert entry.headers["tracestate"] == "a=b"


async def test_an_engine_gets_each_of_a_clients_tracestate_headers(spans):
    """RFC 9110, 5.3: several of one name are one list, and without spans the engine has it whole."""
    engines = sims()
    headers = httpx.Headers([*HEADERS.items(), ("tracestate", "a=b"), ("tracestate", "c=d")])
    await served(spans, engines, headers=headers)

    (entry,) = engines["d0"].log
    assert entry.headers["tracestate"] == "a=b,c=d"


async def test_a_tracestate_that_is_none_leaves_no_line_in_the_log(spans, caplog):
    """A client would write 8 KB into it with each request."""
    engines = sims()
    await served(spans, engines, headers=HEADERS | {"tracestate": "x" * 8000})

    (entry,) = engines["d0"].log
    assert "tracestate" not in entry.headers
    assert "xxx" not in caplog.text


async def test_the_span_of_a_leg_says_where_it_went_and_what_came_back(spans):
    """And when the head of the answer was there."""
    await served(spans, sims())

    for leg, role, instance in (("prefill leg", "prefill", "prefill-0"), ("decode leg", "decode", "decode-0")):
        found = spans[leg].attributes
        assert (found["pdrelay.role"], found["pdrelay.instance"]) == (role, instance)
        assert found["http.response.status_code"] == 200
        assert [event.name for event in spans[leg].events] == ["answered"]


async def test_legs_that_go_out_together_have_no_handoff(spans):
    """In push nothing waits between them; the first request teaches the router where the engine is."""
    async with traced_router(spans, sims(mode="push"), KvTransferMode.PUSH) as client:
        for _ in range(2):
            assert (await client.post(PATH, json=BODY)).status_code == 200

    first, second = [span for span in spans.all if span.name.startswith("POST")]
    of_second = sorted(span.name for span in spans.all if span.context.trace_id == second.context.trace_id)
    assert of_second == [f"POST {PATH}", "decode leg", "prefill leg"]
    assert "handoff" in [span.name for span in spans.all if span.context.trace_id == first.context.trace_id]
    assert second.attributes["pdrelay.mode"] == "push"
    assert first.attributes["pdrelay.mode"] == "push_cold"


async def test_a_leg_that_fails_is_a_span_that_failed(spans):
    """With the reason, and the next try beside it."""
    engines = sims()
    engines["d0"].inject(SimulatedFault(FaultKind.DROP, times=1))
    await served(spans, engines)

    bad, good = [span for span in spans.all if span.name == "decode leg"]
    why = "decode-0 broke off before its answer was complete"
    assert (bad.status.status_code, bad.status.description) == (StatusCode.ERROR, why)
    assert good.status.status_code is StatusCode.UNSET
    assert good.attributes["pdrelay.instance"] == "decode-0"
    assert spans[f"POST {PATH}"].attributes["pdrelay.retries"] == 1


async def test_a_leg_that_is_refused_is_a_span_that_failed(spans):
    """By its status; the request is the client's mistake, and none of the router's."""
    engines = sims()
    engines["p0"].inject(SimulatedFault(FaultKind.STATUS, status=422))
    async with traced_router(spans, engines) as client:
        assert (await client.post(PATH, json=BODY)).status_code == 422

    assert spans["prefill leg"].attributes["http.response.status_code"] == 422
    assert spans["prefill leg"].status.status_code is StatusCode.ERROR
    assert spans[f"POST {PATH}"].status.status_code is StatusCode.UNSET
    assert {span.name for span in spans.all} == {"prefill leg", f"POST {PATH}"}


async def test_a_request_that_is_refused_has_a_span_and_no_legs(spans):
    """Before any engine is asked."""
    async with traced_router(spans, sims()) as client:
        assert (await client.post(PATH, json=[])).status_code == 400

    (span,) = spans.all
    assert span.attributes["http.response.status_code"] == 400


@pytest.mark.parametrize(("status", "bad"), [(200, False), (404, False), (499, False), (502, True)])
def test_the_span_of_a_request_says_how_it_ended(spans, status, bad):
    """A client's mistake is no error of the router."""
    record = RequestRecord(RequestId("r"), "/v1/odd/17")
    span = spans.traces.request(record, ())
    record.over(status, 0.1)
    span.end()

    span = spans["request"]  # names are few; the path is an attribute
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["pdrelay.request_id"] == "r"
    assert (span.status.status_code is StatusCode.ERROR) is bad
    assert span.resource.attributes["service.name"] == "pdrelay"
    assert span.parent is None


@pytest.mark.parametrize("traceparent", [b"", b"00-odd", b"\xff\xfe", CLIENTS.encode() + b"-x"])
def test_an_odd_traceparent_starts_a_trace_of_its_own(spans, traceparent):
    """It comes from a client, who may write anything."""
    headers = ((b"traceparent", traceparent),)
    spans.traces.request(RequestRecord(RequestId("r"), PATH), headers).end()

    assert spans[f"POST {PATH}"].parent is None


async def test_a_trace_that_the_client_does_not_sample_is_not_sampled(spans):
    """The engines are told the same."""
    engines = sims()
    await served(spans, engines, headers={"traceparent": CLIENTS[:-1] + "0"})

    assert not spans.all
    assert [entry.headers["traceparent"][-3:] for engine in engines.values() for entry in engine.log] == ["-00"] * 2


async def test_lists_of_models_leave_no_span_of_a_leg(spans):
    """They are no legs."""
    async with traced_router(spans, sims()) as client:
        assert (await client.get("/v1/models")).status_code == 200

    assert [span.name for span in spans.all] == ["request"]
