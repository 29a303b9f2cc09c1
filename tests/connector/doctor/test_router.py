"""What a router's metrics say of its hand-overs."""

import time

import pytest

from pdrelay_connector.doctor.router import read_router, times_in
from pdrelay_connector.errors import Unreachable
from support.raw_engine import closing, endless, raw_engine

pytestmark = pytest.mark.edges


TEXT = """
# TYPE pdrelay_handoff_gap_seconds histogram
pdrelay_handoff_gap_seconds_bucket{le="0.5"} 90
pdrelay_handoff_gap_seconds_bucket{le="20.0"} 97
pdrelay_handoff_gap_seconds_bucket{le="30.0"} 99
pdrelay_handoff_gap_seconds_bucket{le="+Inf"} 100
"""


def test_hand_overs_that_leave_no_step_of_the_lease_are_counted():
    """Of a lease of 30 s, 25 s may pass: the bound below counts."""
    times = times_in(TEXT, lease=30.0)

    assert (times.handoffs, times.slow_handoffs, times.slow) == (100, 3, 20.0)


def test_a_router_that_has_handed_nothing_over_says_nothing():
    assert times_in(TEXT.replace('"} ', '"} 0e'), lease=30.0).handoffs == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1"])
def test_what_is_no_router_is_said(url):
    with pytest.raises(Unreachable):
        read_router(url, lease=30.0)


@pytest.mark.parametrize(
    ("text", "handoffs"),
    [
        (
            TEXT + 'pdrelay_handoff_gap_seconds_bucket{le="x"} 1\npdrelay_handoff_gap_seconds_bucket{le="1"} 1.2.3\n',
            100,
        ),
        (TEXT.replace("100", "1e999").replace("99", "NaN"), 97),
        (TEXT.replace('{le="', '{worker="0",role="le=",le="'), 100),
    ],
    ids=["no-numbers", "infinite", "labels"],
)
def test_lines_that_make_no_sense_are_left_out(text, handoffs):
    assert times_in(text, lease=30.0).handoffs == handoffs


@pytest.mark.parametrize("text", ["pdrelay_handoff_gap_seconds_bucket{\n", 'pdrelay_handoff_gap_seconds_bucket{le="1,'])
def test_many_lines_are_read_in_time(text):
    """A pattern that looks for the end of each in all that follows would take days."""
    began = time.monotonic()
    times_in(TEXT + text * 300_000, lease=30.0)

    assert time.monotonic() - began < 20


FLOOD = endless(b"HTTP/1.1 200 OK\r\n\r\n", TEXT.encode() * 10_000)
TOO_LATE = "within 1 s|timed out"  # the second: the server got no core for a second, and that is a limit, too


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (endless(b"HTTP/1.1 200 OK\r\n\r\n", b"\n", pause_s=0.1), TOO_LATE),
        (endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", pause_s=0.1), TOO_LATE),
        (FLOOD, "more than"),
        (closing(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"), "is it a router?"),
        (closing(b"HTTP/1.1 999999 Oh\r\n\r\n"), "does not show its metrics"),
        (closing(b"\0\1\2" * 9000), "does not show its metrics"),
    ],
    ids=["drip", "drip-head", "flood", "html", "status", "bytes"],
)
def test_a_server_that_is_no_router_is_said_in_time(script, said):
    """And not as a router without hand-overs: "no findings" would be read as good news."""
    began = time.monotonic()
    timeout = 1.0 if said is TOO_LATE else 60.0  # the others answer, and a busy machine takes its time for that
    with raw_engine(script) as engine, pytest.raises(Unreachable, match=said):
        read_router(f"http://{engine.at}", lease=30.0, timeout=timeout)

    assert time.monotonic() - began < 30
