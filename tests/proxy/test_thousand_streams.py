"""1,000 streams at once, three times: all complete and exact, and nothing grows. ``make soak`` does it for long."""

import pytest

from benchmarks.router import soak

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # each of 3,000 streams takes five seconds

STREAMS, SECONDS = 1000, 5.0
GROWTH = 8 << 20  # bytes


def test_a_thousand_streams_three_times():
    with soak.running("test") as runner:
        found = soak.rounds(runner, streams=STREAMS, seconds=SECONDS, count=3)

    assert runner.faults == {}
    assert [one["requests"] for one in found] == [STREAMS] * 3
    assert found[2]["rss"] - found[1]["rss"] < GROWTH
    assert found[2]["sockets"] <= found[0]["sockets"] + 2
