"""Pairs that cannot meet rest, and one request at a time shows whether they can again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.pair_history import PairTrouble
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.features.pairs.core.pair_health import (
    MOST_SETS,
    OF_THE_PAIR,
    TRANSITIONS,
    TRIAL_S,
    FailingPair,
    PairEvent,
    PairHealth,
    PairState,
)

PAIR = ("prefill-0", "decode-0")
MAX_REST_S = 100.0


def health():
    return PairHealth(max_rest_s=MAX_REST_S)


def fail(pairs, pair=PAIR, count=3, now=0.0, reason=PairFailure.HANDSHAKE):
    return pairs.failed(pair, reason, count, now=now)


def states(pairs):
    return {pair: each.state for pair, each in pairs.pairs()}


def test_a_pair_rests_after_some_failures_in_a_row():
    """One lost connection is no firewall."""
    pairs = health()

    assert fail(pairs, count=2) is None
    assert pairs.avoided("decode-0") == frozenset()
    rests = fail(pairs, count=1, now=7.0)
    assert (rests.state, rests.reason, rests.rest_s) == (PairState.RESTING, PairFailure.HANDSHAKE, 30.0)
    assert pairs.avoided("decode-0") == {"prefill-0"}
    assert pairs.next_at == 37.0


def test_a_success_between_two_failures_counts():
    """It can meet, and what failed was something else."""
    pairs = health()
    fail(pairs, count=2)
    pairs.worked(PAIR)
    fail(pairs, count=2)

    assert states(pairs) == {PAIR: PairState.FAILING}
    assert pairs.resting == 0


@pytest.mark.parametrize("reason", sorted(set(PairFailure) - OF_THE_PAIR))
def test_failures_of_one_engine_are_no_evidence_against_a_pair(reason):
    """Its other partners have them, too."""
    pairs = health()
    fail(pairs, count=99, reason=reason)

    assert not pairs


def test_a_pair_has_rested_also_if_its_trial_was_postponed():
    """That of two decode engines is always: no request has such a pair, and streams that move do."""
    pairs = health()
    assert not pairs.has_rested(PAIR, now=99.0)
    fail(pairs)
    assert not pairs.has_rested(PAIR, now=29.9)
    pairs.postpone(pairs.due(now=30.0), now=30.0)
    assert pairs.has_rested(PAIR, now=30.1)
    pairs.tried(PAIR, now=30.1)
    assert not pairs.has_rested(PAIR, now=30.2)
    pairs.postpone(pairs.due(now=30.1 + TRIAL_S), now=30.1 + TRIAL_S)

    assert not pairs.has_rested(PAIR, now=30.1 + TRIAL_S)
    assert pairs.has_rested(PAIR, now=60.2 + TRIAL_S)


def test_a_rest_ends_with_one_request_and_doubles_with_each_that_fails():
    """Up to a limit: a firewall may stay for ever, and be opened at any time."""
    pairs = health()
    now = 0.0
    rests = []
    fail(pairs)
    for _ in range(4):
        rests.append(pairs.next_at - now)
        assert pairs.due(now=pairs.next_at - 0.01) == []
        now = pairs.next_at
        assert pairs.due(now=now) == [PAIR]
        pairs.tried(PAIR, now=now)
        assert pairs.due(now=now + 1) == []
        assert pairs.avoided("decode-0") == {"prefill-0"}
        assert fail(pairs, count=1, now=now) is None  # it is said once that a pair rests

    assert rests == [30.0, 60.0, 100.0, 100.0]
    pairs.tried(PAIR, now=pairs.due(now=now + 100) and now + 100)
    assert pairs.worked(PAIR) is not None
    assert not pairs
    assert pairs.next_at == math.inf


def test_a_trial_that_shows_nothing_is_repeated():
    """Its client may have gone, or the prompt was in the decode engine's own cache."""
    pairs = health()
    fail(pairs)
    pairs.due(now=30.0)
    pairs.tried(PAIR, now=30.0)

    assert pairs.due(now=30.0 + TRIAL_S - 1) == []
    assert pairs.due(now=30.0 + TRIAL_S) == [PAIR]
    assert pairs.get(PAIR).rest_s == 30.0


def test_a_trial_that_no_engine_can_take_waits():
    """Each request would look at all pairs again."""
    pairs = health()
    fail(pairs)
    pairs.postpone(pairs.due(now=30.0), now=30.0)

    assert pairs.next_at > 30.0
    assert states(pairs) == {PAIR: PairState.RESTING}


def test_failures_that_are_reported_late_do_not_prolong_a_rest():
    """They were under way when it began."""
    pairs = health()
    fail(pairs)
    fail(pairs, count=5, now=10.0)

    assert pairs.next_at == 30.0


def test_a_leg_that_ends_well_does_not_heal_what_decode_engines_report():
    """It ends well if the decode engine computes the prompt."""
    pairs = health()
    fail(pairs)

    assert pairs.worked(PAIR, only=PairFailure.ENGINE_ERROR) is None
    assert pairs.resting == 1


def test_pairs_of_an_engine_that_is_gone_are_forgotten():
    """Its address may be another's."""
    pairs = health()
    others = [("prefill-1", "decode-0"), ("prefill-0", "decode-1"), ("prefill-1", "decode-1")]
    for pair in (PAIR, *others):
        fail(pairs, pair)

    assert sorted(pairs.forget("prefill-0")) == [PAIR, ("prefill-0", "decode-1")]
    pairs.keep(frozenset({"prefill-1", "decode-1"}))
    assert states(pairs) == {("prefill-1", "decode-1"): PairState.RESTING}
    assert pairs.avoided("decode-0") == frozenset()


def test_decode_engines_that_avoid_different_engines_are_few():
    """Each set of avoided engines is a group for routing, whose list has all prefill engines."""
    pairs = health()
    for number in range(MOST_SETS + 10):
        fail(pairs, (f"prefill-{number}", f"decode-{number}"))

    assert pairs.resting == MOST_SETS
    assert pairs.unkept == 10
    assert fail(pairs, ("prefill-0", f"decode-{MOST_SETS}")) is not None  # a set that there is already


def test_what_is_remembered_is_bounded():
    """With thousands of engines a cut network is millions of pairs."""
    pairs = PairHealth(most=3)
    fail(pairs)
    for number in range(1, 6):
        fail(pairs, (f"prefill-{number}", "decode-1"), count=1)

    assert len(pairs) == 3
    assert states(pairs)[PAIR] is PairState.RESTING


@pytest.mark.parametrize("state", list(PairState))
def test_what_is_not_in_the_table_raises(state):
    """It would be a bug."""
    for event in PairEvent:
        pair = FailingPair(PairFailure.TIMEOUT, 0.0)
        pair.state = state
        if event in TRANSITIONS[state]:
            pair.on(event, 1.0)
            assert pair.state is TRANSITIONS[state][event]
        else:
            with pytest.raises(KeyError):
                pair.on(event, 1.0)


PAIRS = st.tuples(st.sampled_from(["p0", "p1"]), st.sampled_from(["d0", "d1"]))
STEPS = st.one_of(
    st.tuples(st.just("fail"), PAIRS, st.integers(1, 4)),
    st.tuples(st.just("work"), PAIRS, st.just(0)),
    st.tuples(st.just("wait"), PAIRS, st.integers(1, 120)),
    st.tuples(st.just("try"), PAIRS, st.just(0)),
    st.tuples(st.just("forget"), PAIRS, st.just(0)),
)


@given(st.lists(STEPS, max_size=60))
def test_whatever_happens_only_pairs_that_failed_in_a_row_are_avoided(steps):
    """And each of them is tried by one request at a time, no sooner than its rest is over."""
    pairs = health()
    now = 0.0
    in_a_row = dict[tuple[str, str], int]()
    tried_at = dict[tuple[str, str], float]()
    for what, pair, number in steps:
        if what == "fail":
            fail(pairs, pair, number, now)
            in_a_row[pair] = in_a_row.get(pair, 0) + number
        elif what == "work":
            pairs.worked(pair)
            in_a_row.pop(pair, None)
        elif what == "forget":
            pairs.forget(pair[0])
            in_a_row = {each: count for each, count in in_a_row.items() if each[0] != pair[0]}
        elif what == "wait":
            now += number
        else:
            for each in pairs.due(now=now)[:1]:
                assert in_a_row[each] >= 3
                assert now - tried_at.get(each, -math.inf) >= min(TRIAL_S, 30.0) or each not in tried_at
                tried_at[each] = now
                pairs.tried(each, now=now)
        tried_at = {each: at for each, at in tried_at.items() if each in in_a_row}

        avoided = {(prefill, decode) for decode in ("d0", "d1") for prefill in pairs.avoided(decode)}
        assert avoided == {each for each, count in in_a_row.items() if count >= 3}
        assert pairs.resting == len(avoided)
        assert pairs.next_at == min((each.due for _, each in pairs.pairs()), default=math.inf)


def test_one_wrong_block_has_a_pair_rest_for_as_long_as_any_may():
    """Other loads show nothing of their content, so those that were under way do not end the rest."""
    pairs = health()
    rests = fail(pairs, count=1, reason=PairFailure.WRONG_KV)
    assert (rests.state, rests.rest_s) == (PairState.RESTING, 100.0)
    assert pairs.worked(PAIR) is None
    fail(pairs, count=1, reason=PairFailure.TIMEOUT)
    assert (states(pairs), pairs.get(PAIR).reason) == ({PAIR: PairState.RESTING}, PairFailure.WRONG_KV)
    pairs.tried(PAIR, now=100.0)

    assert pairs.worked(PAIR) is rests
    assert pairs.resting == 0


def test_troubles_are_those_that_a_decode_engine_shows_now():
    """What it shows no longer is over; what it showed before is no news."""
    health = PairHealth(most=2)
    secret, model = PairTrouble("secret", "a", lasts=True), PairTrouble("model", "b", lasts=True)

    assert health.shown("d0", {("p0", "d0"): secret}) == [("p0", "d0")]
    assert health.shown("d0", {("p0", "d0"): secret}) == []
    assert health.shown("d1", {("p0", "d1"): model}) == [("p0", "d1")]
    assert health.shown("d0", {("p0", "d0"): model}) == [("p0", "d0")]
    health.shown("d2", {("p0", "d2"): model})
    assert set(health.troubles) == {("p0", "d0"), ("p0", "d1")}
    health.shown("d0", {})
    assert set(health.troubles) == {("p0", "d1")}
    health.forget("p0")
    assert health.troubles == {}
    health.shown("d0", {("p0", "d0"): secret})
    health.keep(frozenset(["d0"]))
    assert health.troubles == {}
