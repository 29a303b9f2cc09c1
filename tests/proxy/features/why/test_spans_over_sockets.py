"""Spans at a real collector."""

import http.server
import re
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pdrelay_proxy.app import build
from pdrelay_proxy.cli import build_parser
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.why.settings import WhySettings
from pdrelay_proxy.options import serve_settings
from pdrelay_proxy.settings import LogFormat, Settings
from support.sim import cluster, router, sims

pytestmark = pytest.mark.edges


TEXT = {"prompt": "once upon a time", "max_tokens": 5, "stream": True}
SECRET = "Bearer sk-never-in-a-log"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collector():
    """An OTLP collector on this machine; yields its base URL and the spans it has got."""
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", spans
        finally:
            server.shutdown()
            thread.join()


def test_spans_reach_a_collector_and_engines_join_the_trace():
    """What is left is sent when the router ends."""
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with collector() as (url, spans):
        with cluster(settings=Settings().with_features(WhySettings(url))) as fleet:
            response = httpx.post(f"http://{fleet.router}/v1/completions", json=TEXT, headers=headers, timeout=20)
        by_name = {span.name: span for span in spans}

    assert response.status_code == 200
    assert by_name.keys() == {"POST /v1/completions", "prefill leg", "handoff", "decode leg"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    for name, leg in (("p0", "prefill leg"), ("d0", "decode leg")):
        (entry,) = fleet.engines[name].log
        assert entry.headers["traceparent"] == f"00-{TRACE}-{by_name[leg].span_id.hex()}-01"


def test_spans_without_their_library_are_refused_in_one_sentence(monkeypatch):
    """At the start, and not at the first request."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "pdrelay_proxy.features.why.traces", raising=False)

    with pytest.raises(ConfigError, match=r"OpenTelemetry is not installed: pip install 'pdrelay\[tracing\]'"):
        build(Settings().with_features(WhySettings("http://collector:4318")))


@pytest.mark.parametrize(
    ("arguments", "endpoint"), [([], "http://env:4318"), (["--otlp-endpoint", "https://flag:1"], "https://flag:1")]
)
def test_the_collector_is_named_as_for_every_other_program(monkeypatch, arguments, endpoint):
    """In the environment; an argument says it better."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318")
    parsed = build_parser(["serve"]).parse_args(["serve", *arguments, "--log-format", "json"])

    settings = serve_settings(parsed)
    assert settings.for_feature(WhySettings).otlp_endpoint == endpoint
    assert settings.log_format is LogFormat.JSON


def test_a_collector_that_is_no_url_is_refused():
    """With what would be right."""
    parsed = build_parser(["serve"]).parse_args(["serve", "--otlp-endpoint", "collector:4318"])

    right = "'collector:4318' is not a URL: write http://host:port or https://host:port"
    with pytest.raises(ConfigError, match=re.escape(right)):
        serve_settings(parsed)


async def test_an_address_that_no_collector_has_does_not_stop_the_router(monkeypatch):
    """Spans are lost then, and nothing else; the end waits for the collector no longer than the operator says."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    settings = Settings().with_features(WhySettings("http://127.0.0.1:1"))
    async with router(sims(), settings) as client:
        response = await client.post("/v1/completions", json=TEXT)

    assert response.status_code == 200
