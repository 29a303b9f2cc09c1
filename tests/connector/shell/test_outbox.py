"""What our threads hand to the engine."""

import threading
import time

from pdrelay_connector.core.counters import StatsReport, TransferSample
from pdrelay_connector.shell.outbox import Outbox

ONE = StatsReport({"loads": 1}, {}, [TransferSample(0.1, 64, 1)])


def test_results_are_taken_once_and_in_order():
    """A result that is returned twice would free blocks twice."""
    outbox = Outbox()
    outbox.put(["a", "b"], StatsReport())
    outbox.put(["c"], StatsReport())

    assert outbox
    assert outbox.take_items() == ["a", "b", "c"]
    assert outbox.take_items() == []
    assert not outbox


def test_only_results_are_announced():
    """Numbers alone are no reason to wake an engine."""
    announced = []
    outbox = Outbox(on_news=lambda: announced.append(1))
    outbox.put([], ONE)
    assert announced == []
    outbox.put(["a"], StatsReport())

    assert announced == [1]


def test_numbers_add_up_until_they_are_taken():
    """However seldom vLLM asks, and without one report for each turn of a thread."""
    outbox = Outbox()
    for _ in range(200):
        outbox.put([], ONE)
    assert len(outbox._reports) <= 64
    report = outbox.take_report()

    assert report.counters == {"loads": 200}
    assert len(report.transfers) == 200
    assert not outbox.take_report()


def test_waiting_ends_with_a_result():
    """Or with the time; a result that is there already needs no waiting."""
    outbox = Outbox()
    start = time.monotonic()
    outbox.wait(0.05)
    assert time.monotonic() - start >= 0.04
    timer = threading.Timer(0.05, outbox.put, (["a"], StatsReport()))
    timer.start()
    outbox.wait(50)
    timer.join()
    outbox.wait(50)

    assert time.monotonic() - start < 20
    assert outbox.take_items() == ["a"]
