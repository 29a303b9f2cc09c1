"""The benchmark of roles: it notices what is lost, what is wrong, and what came too late.

A benchmark that does not notice them praises the split that loses the most.
"""

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.roles import bench, report
from benchmarks.roles.trace import HALVES, trace_of
from support.greedy_streams import Stream, follow

pytestmark = pytest.mark.edges


SECONDS = 20
COUNTED = {'xpyd_turns_total{outcome="turned",to="prefill"}': 2.0, 'xpyd_turns_total{outcome="late",to="decode"}': 1.0}


class Quiet(bench.Row):
    """A row without engines."""

    def _settle(self):
        pass

    def _held(self):
        return 0

    def _shown(self):
        return COUNTED


def answered(trace):
    """Every stream, as one engine answers it, in time."""
    return [
        Stream(
            asked.body, text="a b", usage={"completion_tokens": 11}, finish="length", is_whole=True, ids={"1"},
            first_s=1.0, last_s=1.5,
        )
        for asked in trace
    ]  # fmt: skip


def test_all_rows_have_the_same_requests():
    """Else one of them had an easier day."""
    assert trace_of(SECONDS) == trace_of(SECONDS)
    assert [asked.half for asked in trace_of(SECONDS)] == sorted(
        [asked.half for asked in trace_of(SECONDS)], key=HALVES.index
    )


def test_what_is_lost_wrong_or_late_is_not_served_well():
    """Each of them is counted for itself."""
    trace = trace_of(SECONDS)
    streams, expected = answered(trace), answered(trace)
    streams[0].is_whole = False
    streams[1].text = "a c"
    streams[2].error = "no engine"
    streams[3].is_broken = True
    streams[4].first_s = bench.TTFT_S + 0.1
    streams[5].last_s = 1.0 + 11 * bench.ITL_S
    found = Quiet("auto", None, Path("model"), Path("folder")).result(trace, streams, expected, SECONDS)

    assert found["good"] == len(trace) - 6
    assert (found["right"], found["errors"], found["wrong"]) == (len(trace) - 4, 2, 1)
    assert found["requests"] - found["right"] - found["errors"] - found["wrong"] == 1


def test_the_page_compares_with_the_best_split(tmp_path):
    """A split that is right for one half is the one to beat."""
    trace, rows = trace_of(SECONDS), {}
    for number, name in enumerate(("1 + 2", "2 + 1", "auto")):
        streams = answered(trace)
        for stream in streams[: (12, 20, 2)[number]]:
            stream.first_s = 100.0
        rows[name] = Quiet(name, None, Path("model"), tmp_path).result(trace, streams, answered(trace), SECONDS)
    settings = bench.settings_of(type("Args", (), {"seconds": SECONDS}))
    report.write({"machine": bench.page.machine(), "settings": settings, "rows": rows}, tmp_path / "roles.json")

    line = next(
        line for line in (tmp_path / "roles.md").read_text().splitlines() if line.startswith("| `--roles auto`")
    )
    assert f" {(len(trace) - 2) / (len(trace) - 12):.2f} | 2 | 0 | 0 | 0 |" in line
    assert report.earlier(tmp_path / "roles.json", settings).keys() == rows.keys()


async def test_a_line_of_a_stream_ends_where_sse_says():
    """Texts have U+0085 and its like, and a client that ends lines there cannot read them."""

    async def answer(_):
        event = 'data: {"id": "1", "choices": [{"text": "a\x85b\u2028c", "finish_reason": "length"}]}\n\n'
        return StreamingResponse(iter([event.encode()[:50], event.encode()[50:], b"data: [DONE]\n\n"]))

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    stream = Stream({"prompt": "a"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        await follow(client, "http://engine", stream)

    assert (stream.text, stream.is_whole) == ("a\x85b\u2028c", True)
