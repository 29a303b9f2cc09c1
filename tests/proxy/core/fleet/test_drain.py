"""When an engine has nothing left."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.member import Drain
from pdrelay_proxy.core.model import Role


def verdict(drain, *, role=Role.PREFILL, in_flight=0, now=0.0):
    return drain.verdict(role, in_flight, patience_s=60, now=now)


def test_a_decode_engine_is_empty_with_its_last_request():
    """Nobody reads from it."""
    drain = Drain(0.0)

    assert verdict(drain, role=Role.DECODE, in_flight=1) is None
    assert verdict(drain, role=Role.DECODE) == "has no request left"


def test_a_prefill_engine_is_empty_when_it_keeps_nothing_twice():
    """A number of before the last request proves nothing."""
    drain = Drain(0.0)
    drain.reading(0)
    drain.reading(0)
    assert verdict(drain, in_flight=1) is None
    drain.reading(0)
    assert verdict(drain) is None
    drain.reading(2)
    drain.reading(0)
    assert verdict(drain) is None
    drain.reading(0)
    assert verdict(drain) == "has no request left and keeps nothing for decode engines"


def test_one_that_does_not_tell_is_given_time():
    """By then its leases have run out; that it was a guess can be seen."""
    drain = Drain(0.0)
    assert verdict(drain, in_flight=1, now=100) is None
    assert verdict(drain, now=159) is None
    assert verdict(drain, now=160) == "has had no request for 60 s, but does not say what it keeps"
    drain.reading(0.5)
    assert verdict(drain, now=160).endswith("still shows 0.5 of what it keeps")


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, 0, 0.0, 1.0])), max_size=30))
def test_nothing_with_a_request_is_empty(steps):
    """Whatever the numbers say."""
    drain = Drain(0.0)
    for now, (in_flight, kept) in enumerate(steps):
        drain.reading(kept)
        found = verdict(drain, in_flight=in_flight, now=float(now))

        assert found is None or (in_flight == 0 and kept == 0)
