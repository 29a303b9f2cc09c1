"""The numbers an operator sees."""

import ast
from pathlib import Path

import pytest

import pdrelay_connector
from pdrelay_connector.core.counters import (
    CAUSES,
    COUNTERS,
    EVENTS_DROPPED,
    FAILURES,
    GAUGES,
    LOAD_OUTCOMES,
    LOADED,
    Counters,
    ForwardingCounters,
    StatsReport,
    TransferSample,
    merge,
)
from pdrelay_connector.core.lease.kv_params import REFUSALS
from pdrelay_connector.core.lease.prefill_scheduler import _COUNTER

SAMPLE = TransferSample(0.1, 64, 1)


def choices(argument):
    """Both sides of ``a if ... else b``, or the argument itself."""
    return (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)


def counted():
    """Every name that the package's source counts or fails a load with."""
    names = {*_COUNTER.values(), *REFUSALS.values(), EVENTS_DROPPED}
    for source in Path(pdrelay_connector.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
                "count",
                "count_load",
                "_fail",
                "_abort",
                "_break_off",
            ):
                constants = (
                    arg.value for top in node.args[:2] for arg in choices(top) if isinstance(arg, ast.Constant)
                )
                names |= {value for value in constants if isinstance(value, str)}
    return names


def test_everything_that_is_counted_is_described_and_the_other_way_round():
    """An unknown counter would break the metrics at the first event; an unused one says nothing, for ever."""
    assert counted() == set(COUNTERS)


@pytest.mark.parametrize("text", [*COUNTERS.values(), *GAUGES.values()])
def test_descriptions_are_sentences(text):
    """They are the help lines in Prometheus."""
    assert text[0].isupper()
    assert text.endswith(".")


def test_a_tally_starts_again_after_each_report():
    """Counters are increments: told twice they would count twice."""
    counters = Counters()
    counters.count("loads")
    counters.count("loads", 2)
    counters.observe(SAMPLE)

    assert counters.take_report() == StatsReport({"loads": 3}, {}, [SAMPLE])
    assert not counters.take_report()


def test_reports_add_up_but_gauges_are_replaced():
    """Of a gauge only the latest value is true."""
    merged = merge(
        [
            StatsReport({"loads": 1}, {"leases_held": 5.0}, [SAMPLE]),
            StatsReport({"loads": 2, "leases_lost": 1}, {"leases_held": 0.0}),
        ]
    )

    assert merged == StatsReport({"loads": 3, "leases_lost": 1}, {"leases_held": 0.0}, [SAMPLE])
    assert not merge([])


def test_merging_leaves_its_inputs_alone():
    """They may be another thread's."""
    report = StatsReport({"loads": 1}, {"leases_held": 5.0}, [SAMPLE])
    merge([report, report])

    assert report == StatsReport({"loads": 1}, {"leases_held": 5.0}, [SAMPLE])


def test_what_tells_keeps_nothing():
    """Each number once, and at once."""
    told = []
    counters = ForwardingCounters(told.append)
    counters.count("pushes", 2)
    counters.observe(SAMPLE)

    assert told == [StatsReport(counters={"pushes": 2}), StatsReport(transfers=[SAMPLE])]
    assert not counters.take_report()


def test_loads_are_counted_by_prefill_engine_too():
    """A router keeps two engines apart that cannot meet; an aborted load says nothing of them."""
    counters = Counters()
    for name in ("loads", "loads_failed_timeout", "loads_failed_timeout", "loads_aborted"):
        counters.count_load(name, "p")
    counters.count_load("loads_skipped_incompatible", "q")
    report = counters.take_report()

    assert report.peer_loads == {"p": {"loaded": 1, "timeout": 2}, "q": {"refused": 1}}
    assert report.counters == {
        "loads": 1, "loads_failed_timeout": 2, "loads_aborted": 1, "loads_skipped_incompatible": 1,
    }  # fmt: skip
    assert not counters.take_report()


@pytest.mark.parametrize(
    ("name", "cause", "outcome"),
    [
        ("loads_skipped_incompatible", "secret", "secret"), ("loads_failed_handshake", "certificate", "certificate"),
        ("loads_failed_handshake", "", "handshake"), ("loads_failed_transfer", "secret", "transfer"),
    ],
)  # fmt: skip
def test_engines_that_have_not_met_are_counted_by_the_cause(name, cause, outcome):
    """Another secret and another model are mended in different ways; neither shows in an answer."""
    counters = Counters()
    counters.count_load(name, "p", cause=cause)
    report = counters.take_report()

    assert (report.counters, report.peer_loads) == ({name: 1}, {"p": {outcome: 1}})
    assert report.failures == {"p": outcome}
    assert merge([report, StatsReport(failures={"p": "lease"})]).failures == {"p": "lease"}
    assert not counters.take_report().failures


def test_every_way_to_fail_has_words_of_its_own():
    """A router reads them as bytes: no peer, and no client, adds a series or an escape."""
    ways = {outcome for outcome in (*CAUSES, *LOAD_OUTCOMES.values()) if outcome != LOADED}

    assert FAILURES.keys() == ways
    assert len(set(FAILURES.values())) == len(ways)
    assert not {*'"\\\n'} & {*"".join(FAILURES.values())}


def test_loads_by_prefill_engine_add_up():
    """Of all ranks and intervals; the reports stay as they are."""
    one, other = StatsReport(peer_loads={"p": {"loaded": 1}}), StatsReport(peer_loads={"p": {"loaded": 2, "lease": 1}})

    assert merge([one, other]).peer_loads == {"p": {"loaded": 3, "lease": 1}}
    assert (one.peer_loads, other.peer_loads["p"]["loaded"]) == ({"p": {"loaded": 1}}, 2)


def test_how_loads_end_is_told_by_counters_that_exist():
    """Each outcome has one."""
    assert LOAD_OUTCOMES.keys() <= COUNTERS.keys()
    assert len(set(LOAD_OUTCOMES.values())) == len(LOAD_OUTCOMES)
