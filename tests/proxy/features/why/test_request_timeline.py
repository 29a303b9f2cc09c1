"""The rows of a request: the router's have no gaps, an engine's lie inside their leg."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import InstanceId, LegOrder, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import (
    PARTS_KEPT,
    LegRecord,
    MoveRecord,
    PromptParts,
    PromptRecord,
    RequestRecord,
)
from pdrelay_proxy.features.why.request_history import RequestHistory
from pdrelay_proxy.features.why.request_timeline import EngineEvent, engine_rows, legs_of, router_timeline

BEGAN = 1000.0


def leg(name, sent_ms, ms):
    return LegRecord(InstanceId(name), ms, BEGAN + sent_ms / 1e3)


def record(*, prefill=None, decode=None, **changes):
    found = RequestRecord(RequestId("pdrelay-a"), "/v1/completions", prefill=prefill, decode=decode)
    found.began_at = BEGAN
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def rows(timeline):
    return [(row.what, row.where, round(row.begin_ms, 3), round(row.duration_ms, 3)) for row in timeline.rows]


def test_a_pulled_stream_has_a_row_for_each_part():
    """200 ms in each of them show there."""
    found = record(
        prefill=leg("prefill-0", 601, 200.0),
        decode=leg("decode-0", 1001, 200.0),
        received_s=0.2,
        queue_s=0.2,
        admitted_s=0.6,
        ttft_s=1.401,
        duration_s=1.601,
    )

    assert rows(router_timeline(found, 1.601)) == [
        ("receive the body", "router", 0.0, 200.0),
        ("read the request", "router", 200.0, 200.0),
        ("queue", "router", 400.0, 200.0),
        ("choose engines", "router", 600.0, 1.0),
        ("prefill leg", "prefill-0", 601.0, 200.0),
        ("hand over", "router", 801.0, 200.0),
        ("decode leg", "decode-0", 1001.0, 200.0),
        ("write the first event", "router", 1201.0, 200.0),
        ("stream", "decode-0", 1401.0, 200.0),
    ]


def test_legs_that_are_sent_at_once_follow_each_other_in_the_rows():
    """In push; the note says when the second was sent."""
    found = record(prefill=leg("prefill-0", 1, 100.0), decode=leg("decode-0", 1, 150.0), push=LegOrder.CONCURRENT)
    timeline = router_timeline(found, 0.2)

    assert rows(timeline) == [
        ("choose engines", "router", 0.0, 1.0),
        ("prefill leg", "prefill-0", 1.0, 100.0),
        ("decode leg", "decode-0", 101.0, 50.0),
        ("answer", "router", 151.0, 49.0),
    ]
    assert timeline.rows[2].note == "sent at 1.0 ms, beside the other leg"


def test_a_leg_that_failed_is_a_row_and_has_the_name_that_its_engine_knows():
    """Each try has one of its own."""
    found = record(prefill=leg("prefill-0", 1, 50.0))
    found.prefill.name = "pdrelay-a"
    found.set_aside(Role.PREFILL, Failure.HTTP_5XX)
    found.start_over()
    found.prefill, found.decode = leg("prefill-1", 60, 40.0), leg("decode-0", 100, 10.0)
    found.prefill.name = found.decode.name = "pdrelay-a-r1"
    timeline = router_timeline(found, 0.11)

    assert [(row.what, row.where, row.note) for row in timeline.rows] == [
        ("choose engines", "router", ""),
        ("prefill leg", "prefill-0", "failed: http_5xx"),
        ("begin again", "router", ""),
        ("prefill leg", "prefill-1", ""),
        ("decode leg", "decode-0", ""),
    ]
    assert [each.name for each in legs_of(found)] == ["pdrelay-a", "pdrelay-a-r1", "pdrelay-a-r1"]


def test_a_good_leg_of_a_try_that_failed_keeps_its_row():
    """Its time was spent."""
    found = record(prefill=leg("prefill-0", 10, 2000.0), decode=leg("decode-0", 2011, 5.0))
    found.queue_s = found.admitted_s = 0.01
    found.set_aside(Role.DECODE, Failure.UNREACHABLE)
    found.start_over()
    found.decode = leg("decode-1", 2020, 80.0)

    assert rows(router_timeline(found, 2.1)) == [
        ("queue", "router", 0.0, 10.0),
        ("prefill leg", "prefill-0", 10.0, 2000.0),
        ("hand over", "router", 2010.0, 1.0),
        ("decode leg", "decode-0", 2011.0, 5.0),
        ("begin again", "router", 2016.0, 4.0),
        ("decode leg", "decode-1", 2020.0, 80.0),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": 503}, [("refuse", "router", 0.0, 500.0)]),
        ({"queue_s": 0.3}, [("read the request", "router", 0.0, 200.0), ("queue", "router", 200.0, 300.0)]),
    ],
)
def test_a_request_without_legs_has_rows_too(changes, expected):
    """One that was refused, and one that waited in vain."""
    assert rows(router_timeline(record(**changes), 0.5)) == expected


def test_a_stream_that_moves_shows_how_long_it_was_nowhere():
    """From the cut until another engine is asked; the engine that it leaves prefills the rest."""
    found = record(prefill=leg("decode-0", 500, 100.0), decode=leg("decode-1", 600, 100.0), ttft_s=0.101)
    found.past = ((leg("decode-0", 1, 100.0), Role.DECODE),)
    found.moves = (MoveRecord(InstanceId("decode-0"), BEGAN + 0.3),)

    assert rows(router_timeline(found, 0.9))[1:] == [
        ("decode leg", "decode-0", 1.0, 100.0),
        ("stream", "decode-0", 101.0, 199.0),
        ("move", "router", 300.0, 200.0),
        ("prefill leg", "decode-0", 500.0, 100.0),
        ("decode leg", "decode-1", 600.0, 100.0),
        ("stream", "decode-1", 700.0, 200.0),
    ]


def test_a_request_whose_engines_are_not_chosen_yet_is_not_refused():
    """It waits in the queue, or its body comes."""
    assert rows(router_timeline(record(), 0.5)) == [("until now", "router", 0.0, 500.0)]
    assert rows(router_timeline(record(received_s=0.2), 0.5))[-1] == ("until now", "router", 200.0, 300.0)


def test_a_long_body_that_is_read_slowly_shows_where_nothing_waited():
    """It is read in a thread, one after the other."""
    found = record(decode=leg("decode-0", 210, 200.0), queue_s=0.0, admitted_s=0.2)

    assert rows(router_timeline(found, 0.41))[:2] == [
        ("read the request", "router", 0.0, 200.0), ("choose engines", "router", 200.0, 10.0),
    ]  # fmt: skip


def test_a_leg_under_way_takes_all_the_time_until_now():
    """Of a request that hangs this is what one wants to know."""
    found = record(prefill=leg("prefill-0", 1, None))

    assert rows(router_timeline(found, 12.0))[-1] == ("prefill leg", "prefill-0", 1.0, 11999.0)


@given(
    st.lists(st.tuples(st.floats(0, 2e3), st.none() | st.floats(0, 2e3)), max_size=2),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 3),
    st.none() | st.floats(0, 3),
    st.floats(0, 3),
)
def test_the_rows_of_the_router_follow_each_other_and_add_up(legs, received, queued, admitted, ttft, total):
    """Whatever the record says."""
    found = record(received_s=received, queue_s=queued, admitted_s=admitted, ttft_s=ttft)
    for name, (sent, ms) in zip(("prefill", "decode"), legs, strict=False):
        setattr(found, name, leg(f"{name}-0", sent, ms))
    timeline = router_timeline(found, total)

    end = 0.0
    for row in timeline.rows:
        assert row.begin_ms == pytest.approx(end, abs=2e-3)
        assert row.duration_ms > 0
        end = row.begin_ms + row.duration_ms
    assert end == pytest.approx(total * 1e3, abs=2e-3)


def noted(role, events, *, at=5000.0, sent=100.0, ms=400.0, **changes):
    """The engine's rows of a leg that was sent after 100 ms; events are milliseconds after the head came."""
    name = f"{role}-0"
    found = record(**{role: leg(name, sent, ms)}, **changes)
    timeline = router_timeline(found, 0.6)
    made = [EngineEvent(step, at + ms / 1e3, *number) for step, ms, *number in events]
    engine_rows(legs_of(found)[0], made, timeline, at)
    inner = [row for row in timeline.rows if row.leg]
    return [(row.what, round(row.begin_ms), round(row.duration_ms), row.note) for row in inner], timeline.notes


def test_the_steps_of_a_prefill_are_named_by_what_the_engine_did():
    """Chunks of one prompt are one row; its lease goes on behind the leg."""
    events = [
        ("arrived", 101), ("queued", 105), ("considered", 155, 32), ("computing", 160, 2048), ("computing", 260, 500),
        ("finished", 360, 1), ("lease_granted", 361), ("lease_renewed", 400), ("lease_done", 900),
    ]  # fmt: skip

    assert noted("prefill", events) == (
        [
            ("reach the engine", 100, 1, ""),
            ("API server", 101, 4, ""),
            ("wait in the queue", 105, 50, "32 tokens cached"),
            ("wait for a step", 155, 5, ""),
            ("compute", 160, 200, "2048 tokens + 500 tokens"),
            ("answer", 360, 140, ""),
            ("lease", 361, 539, "done, 1 renewal"),
        ],
        [],
    )


def test_the_steps_of_a_pulled_load_are_named():
    """The handshake is a row only where one was waited for."""
    events = [
        ("arrived", 101), ("queued", 102), ("considered", 103), ("load_ordered", 104, 9), ("load_begun", 110),
        ("peer_met", 160), ("reading", 161, 7), ("read", 261), ("loaded", 281), ("computing", 290, 1),
        ("first_token", 300), ("finished", 500, 20),
    ]  # fmt: skip
    found, _ = noted("decode", events)

    assert [(what, ms, note) for what, _, ms, note in found] == [
        ("reach the engine", 1, ""), ("API server", 1, ""), ("wait in the queue", 1, ""),
        ("allocate blocks", 1, "9 tokens"),
        ("order to the worker", 6, ""), ("handshake", 50, ""), ("wait for host memory", 1, ""),
        ("read KV", 100, "7 blocks"),
        ("fence", 20, ""), ("wait for a step", 9, ""), ("compute", 10, "1 token"), ("decode", 200, "20 tokens"),
    ]  # fmt: skip


LOADED = [("arrived", 0), ("load_ordered", 1), ("load_begun", 2)]  # a load, so far


def rows_of_load(events):
    found, _ = noted("decode", [(step, 101 + ms, *number) for step, ms, *number in LOADED + events])
    return [(what, ms, note) for what, _, ms, note in found[3:]]


def test_a_read_without_host_memory_has_no_row_for_it():
    """The worker posts it in the turn in which it has the order."""
    assert rows_of_load([("reading", 2, 7), ("read", 202)]) == [("read KV", 200, "7 blocks")]


def test_a_read_in_parts_shows_the_reads_and_the_waits_apart():
    """Part by part, through host memory: first D waits for room in its own, then P copies a part into its own."""
    events = [("staging", 202, 3), ("reading", 402, 3), ("staging", 602, 2), ("reading", 802, 2), ("read", 1002)]

    assert rows_of_load(events) == [
        ("wait for host memory", 400, ""), ("read KV", 200, "3 blocks"),
        ("wait for host memory", 200, ""), ("read KV", 200, "2 blocks"),
    ]  # fmt: skip


def test_a_read_in_parts_that_only_d_stages_is_one_row():
    """Each part begins when the one before is copied out of D's host memory."""
    assert rows_of_load([("reading", 202, 3), ("reading", 402, 2), ("read", 602)]) == [
        ("wait for host memory", 200, ""), ("read KV", 400, "3 blocks + 2 blocks"),
    ]  # fmt: skip


def test_a_load_that_failed_is_no_wait_for_a_step():
    """The time went into the load, whatever came of it."""
    assert rows_of_load([("reading", 2, 7), ("load_failed", 202), ("computing", 203, 9)]) == [
        ("load, failed", 200, ""), ("wait for a step", 1, ""),
    ]  # fmt: skip


COMPUTED = [("arrived", 101), ("queued", 102), ("computing", 103, 9), ("first_token", 110), ("finished", 180, 20)]


@pytest.mark.parametrize(
    ("role", "changes", "expected"),
    [
        ("decode", {"ttft_s": 0.501}, ("first event", 110, 390, "")),  # a stream
        ("decode", {}, ("answer", 180, 320, "")),
        ("prefill", {"ttft_s": 0.501}, ("answer", 180, 320, "")),
    ],
)
def test_what_an_engine_has_computed_is_on_its_way_until_the_leg_is_answered(role, changes, expected):
    """A stream's first event is, from D's first token; beside it D computes the others."""
    found, _ = noted(role, COMPUTED, **changes)

    assert found[-1] == expected
    assert ("decode", 110, 70, "20 tokens") in found


def test_a_first_event_that_is_there_before_the_engine_notes_its_token_has_no_row():
    """The engine notes it with its next step. A leg that failed has no first event either."""
    begun, _ = noted("decode", COMPUTED, ttft_s=0.11, ms=9.0)
    failed = record(decode=leg("decode-0", 100, 400.0), ttft_s=0.05)
    failed.set_aside(Role.DECODE, Failure.TIMEOUT)
    timeline = router_timeline(failed, 0.6)
    engine_rows(legs_of(failed)[0], [EngineEvent(step, 5 + ms / 1e3) for step, ms, *_ in COMPUTED], timeline, 5.0)

    assert {what for what, *_ in begun} & {"first event", "answer"} == set()
    assert {row.what for row in timeline.rows} & {"first event", "answer"} == set()


def test_what_p_writes_in_push_is_a_row_beside_the_prefill():
    """And D waits for it."""
    written = noted("prefill", [("arrived", 101), ("finished", 200, 1), ("writing", 150, 64), ("written", 220)])[0]
    waited = noted("decode", [("arrived", 101), ("queued", 101), ("load_ordered", 102, 63), ("loaded", 220)])[0]

    assert ("write KV", 150, 70, "1 part") in written
    assert ("wait for the writes of P", 102, 118, "63 tokens") in waited


def test_an_engine_whose_clock_is_wrong_is_named_and_its_rows_are_moved_into_the_leg():
    """It cannot have got the request before it was sent."""
    found, notes = noted("prefill", [("arrived", -900), ("queued", -890), ("finished", -800, 1)])

    assert found[0] == ("API server", 100, 10, "")
    assert notes == ["the clock of prefill-0 differs by about -1000 ms; its rows are moved"]


def test_several_requests_of_one_name_at_an_engine_have_rows_of_their_own():
    """Several answers or inputs have one, and so has what tells the engine to free the blocks."""
    first = [("arrived", 101, 0, "a"), ("queued", 102, 0, "a"), ("finished", 110, 1, "a")]
    later = [("arrived", 103, 0, "b"), ("queued", 108, 0, "b"), ("finished", 600, 1, "b")]
    found, notes = noted("prefill", first + later)

    assert [(what, begin, ms) for what, begin, ms, _ in found] == [
        ("reach the engine", 100, 1), ("API server", 101, 1), ("finish", 102, 8),
        ("API server", 103, 5), ("finish", 108, 492), ("answer", 110, 390),
    ]  # fmt: skip
    assert notes == []


def test_steps_that_this_router_does_not_know_are_left_out():
    """Those of a later connector."""
    found, _ = noted("prefill", [("arrived", 101), ("something", 110), ("queued", 120)])

    assert found[1] == ("API server", 101, 19, "")


def test_the_history_is_a_ring_that_is_asked_by_the_routers_name_or_the_clients():
    """A longer name is another one."""
    history = RequestHistory(3)
    made = [RequestRecord(RequestId(name), client_id=client) for name, client in
            (("pdrelay-0", None), ("pdrelay-1", "mine"), ("pdrelay-2", None), ("pdrelay-12", "mine"))]  # fmt: skip
    for each in made:
        each.queue_s = 0.0
        each.wrote(b"an answer")
        history.add([each])

    assert len(history) == 3
    assert history.find("pdrelay-0") == []
    assert history.find("pdrelay-1") == [made[1]]
    assert history.find("mine") == [made[3], made[1]]
    assert made[3].end == (b"", b"")  # what clients got is not kept


def test_a_request_with_thousands_of_prompts_is_one_entry_of_the_history():
    """It pushes out one other request and keeps the prompts that failed, then those that took longest."""
    history = RequestHistory(2)
    whole = RequestRecord(RequestId("pdrelay-1"), client_id="mine")
    before = RequestRecord(RequestId("pdrelay-0"))
    whole.parts = PromptParts()
    whole.queue_s = 0.0
    before.queue_s = 0.0
    history.add([before])
    for number in range(4096):
        part = PromptRecord(RequestId(f"pdrelay-1-p{number}"), client_id="mine")
        part.decode = LegRecord("decode-0")
        part.over(500 if number == 7 else 200, number / 4096)
        history.add([part])
        whole.parts.add(part)
    history.add([whole])

    assert [row.what for row in router_timeline(whole, 1.0).rows] == ["prompts"]
    assert len(history) == 2
    assert history.find("pdrelay-0") == [before]
    assert history.find("mine") == history.find("pdrelay-1") == [whole]
    assert (whole.parts.count, whole.parts.failed, len(whole.parts.notable)) == (4096, 1, PARTS_KEPT)
    assert [part.request_id for part in history.find("pdrelay-1-p7")] == ["pdrelay-1-p7"]
    assert len(history.find("pdrelay-1-p4095")) == 1
    assert history.find("pdrelay-1-p8") == []


def test_requests_that_were_not_admitted_push_nothing_out():
    """Strangers could send any number of them."""
    history = RequestHistory(1)
    admitted, refused = RequestRecord(RequestId("pdrelay-0")), RequestRecord(RequestId("pdrelay-1"))
    admitted.queue_s = 0.0
    history.add([admitted, refused])

    assert (history.find("pdrelay-0"), history.find("pdrelay-1")) == ([admitted], [])
