"""What share of its streams a decode engine without KV room should lose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.engine_metrics import ShownLoad, shown_load
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief, shares_to_move, streams_to_move

NAMES = st.sampled_from([f"decode-{n}" for n in range(6)])
USAGE = st.floats(0, 1)


def shown(usage, preempted=0.0):
    return ShownLoad(0.0, 4, usage, preempted)


def test_a_full_engine_loses_what_is_above_the_calm_share():
    """0.15 of its KV cache is free behind it."""
    assert shares_to_move({"a": 1.0, "b": 0.1}, 0.95) == {"a": pytest.approx(0.2)}


def test_two_full_engines_share_the_room_that_there_is():
    """No more leaves than fits elsewhere."""
    found = shares_to_move({"a": 1.0, "b": 1.0, "c": 0.6}, 0.95)

    assert found == {"a": pytest.approx(0.1), "b": pytest.approx(0.1)}


@pytest.mark.parametrize(
    "usage", [{}, {"a": 1.0}, {"a": 1.0, "b": 0.94}, {"a": 1.0, "b": 0.79}, {"a": 0.94, "b": 0.0}, {"a": 0.0}]
)
def test_nothing_leaves_without_a_full_engine_or_without_room(usage):
    """A fleet that is full as a whole keeps its streams where they are."""
    assert shares_to_move(usage, 0.95) == {}


@given(st.dictionaries(NAMES, USAGE, max_size=6), st.floats(0.01, 1))
def test_afterwards_no_engine_is_full_that_was_not(usage, above):
    """What leaves fits into the room of the others below the calm share, so nothing moves back."""
    shares = shares_to_move(usage, above)
    calm = max(0.0, above - 0.15)

    assert all(0 < share <= 1 and usage[name] >= above for name, share in shares.items())
    assert (
        sum(usage[name] * share for name, share in shares.items())
        <= sum(calm - used for used in usage.values() if used < calm) + 1e-9
    )


def test_an_engine_that_has_preempted_is_full_whatever_it_shows():
    """What it preempted has left room, for which it waits again."""
    relief = KvRelief(0.95)
    relief.take_loads({"a": shown(0.8, 3.0), "b": shown(0.1)})
    assert relief.full() == set()

    relief.take_loads({"a": shown(0.8, 5.0), "b": shown(0.1)})
    assert relief.shares == {"a": pytest.approx(0.2)}

    relief.take_loads({"a": shown(0.8, 5.0), "b": shown(0.1)})
    assert relief.shares == {}


def test_an_engine_that_starts_anew_has_not_preempted():
    """Its counter is lower than before."""
    relief = KvRelief(0.95)
    relief.take_loads({"a": shown(0.8, 3.0), "b": shown(0.1)})
    relief.take_loads({"b": shown(0.1)})
    relief.take_loads({"a": shown(0.8, 4.0), "b": shown(0.1)})

    assert relief.shares == {}


def test_it_is_off_by_default_and_leaves_out_who_shows_nothing():
    """An engine that does not show its KV cache has neither too much nor room."""
    off, on = KvRelief(None), KvRelief(0.9)
    for relief in (off, on):
        relief.take_loads({"a": shown(1.0), "b": shown(None)})

    assert (off.shares, on.shares) == ({}, {})


def test_preemptions_are_read_in_an_engine_s_metrics():
    """As vLLM writes them."""
    text = (
        b"# TYPE vllm:num_preemptions_total counter\n"
        b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        b'vllm:num_preemptions_total{engine="0",model_name="m"} 7.0\n'
        b'vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09\n'
    )

    assert shown_load(text, now=1.0) == ShownLoad(1.0, 3, None, 7.0)


@pytest.mark.parametrize(("streams", "share", "moved"), [(1, 0.01, 1), (5, 0.1, 1), (40, 0.25, 10), (40, 1.0, 40)])
def test_a_router_rounds_up_what_it_moves(streams, share, moved):
    """An engine with few streams is relieved, too."""
    assert streams_to_move(streams, share) == moved
