"""The life of another router, and what is kept of one that is silent."""

from itertools import product

import pytest

from pdrelay_proxy.features.peers.core.datagrams import MOST_PEERS, DatagramFault
from pdrelay_proxy.features.peers.core.load_payload import LOADS
from pdrelay_proxy.features.peers.core.peer_table import TRANSITIONS, PeerEvent, PeerState, PeerTable
from pdrelay_proxy.features.peers.core.probe_payload import PROBES

A, B = b"a" * 8, b"b" * 8


def with_introduced(*routers):
    table = PeerTable()
    for router in routers:
        assert table.hear(router, LOADS, 7, now=0.0) is None
        table.introduce(router)
    return table


def test_every_state_says_which_events_may_come():
    """What it does not say raises. A router that is silent cannot name another one: that is to speak."""
    found = {(state, event) for state in TRANSITIONS for event in TRANSITIONS[state]}
    refused = set(product(PeerState, PeerEvent)) - found

    assert set(TRANSITIONS) == set(PeerState)
    assert {event for state, event in refused if state is PeerState.FORGOTTEN} == set(PeerEvent)
    assert {event for state, event in refused if state is PeerState.DEPARTED} == {
        PeerEvent.NAME_US,
        PeerEvent.FALL_SILENT,
    }
    assert {event for state, event in refused if state is PeerState.HEARD} == {PeerEvent.FORGET}


def test_a_router_counts_from_when_it_names_this_one_until_it_is_silent():
    """And again when it has done so again."""
    table = PeerTable()
    table.hear(A, LOADS, 1, now=0.0)
    assert (table.present(), table.introduced, table.is_introduced(A)) == ([A], 0, False)

    table.introduce(A)
    assert (table.introduced, table.is_introduced(A)) == (1, True)

    assert table.expire(now=3.0) == ([], [])
    assert table.expire(now=3.1) == ([A], [])
    assert (table.present(), table.introduced, table.is_introduced(A)) == ([], 0, False)

    table.hear(A, LOADS, 2, now=4.0)
    assert (table.present(), table.introduced) == ([A], 0)


def test_what_is_repeated_does_not_keep_a_router():
    """Each kind has numbers of its own."""
    table = with_introduced(A)

    assert table.hear(A, LOADS, 7, now=2.0) is DatagramFault.LATE
    assert table.expire(now=3.1) == ([A], [])
    assert table.hear(A, LOADS, 6, now=3.2) is DatagramFault.LATE
    assert table.hear(A, PROBES, 1, now=3.2) is None


def test_a_router_is_remembered_for_as_long_as_datagrams_are_good_and_no_longer():
    """Twice the 30 s that clocks may differ by."""
    table = with_introduced(A, B)
    table.hear(B, LOADS, 9, now=1.0)
    assert [table.expire(now=now) for now in (3.1, 4.1)] == [([A], []), ([B], [])]

    assert table.expire(now=63.1) == ([], [])
    assert table.hear(A, LOADS, 7, now=63.1) is DatagramFault.LATE
    assert table.expire(now=63.2) == ([], [A])
    assert table.hear(B, LOADS, 9, now=63.2) is DatagramFault.LATE


def test_a_router_that_is_back_may_go_once_more():
    """With what it has sent meanwhile."""
    table = with_introduced(A)
    table.expire(now=3.1)
    table.hear(A, LOADS, 8, now=50.0)

    assert table.expire(now=100.0) == ([A], [])
    assert table.hear(A, LOADS, 8, now=150.0) is DatagramFault.LATE


@pytest.mark.parametrize("surplus", [0, 1])
def test_there_is_a_bound_and_who_went_first_is_forgotten_first(surplus):
    """Whatever a fleet does that starts its routers again and again."""
    table = PeerTable()
    names = [number.to_bytes(8, "big") for number in range(1024 + surplus)]
    forgotten = []
    for place in range(0, len(names), MOST_PEERS):
        for name in names[place : place + MOST_PEERS]:
            assert table.hear(name, LOADS, 1, now=place / 1000) is None
        forgotten += table.expire(now=place / 1000 + 3.1)[1]

    assert forgotten == names[:surplus]


def test_routers_that_are_there_leave_no_room_for_more():
    """Until some are silent."""
    table = with_introduced(*[number.to_bytes(8, "big") for number in range(MOST_PEERS)])
    assert table.hear(A, LOADS, 1, now=0.0) is DatagramFault.TOO_MANY

    table.expire(now=3.1)
    assert table.hear(A, LOADS, 1, now=3.1) is None
