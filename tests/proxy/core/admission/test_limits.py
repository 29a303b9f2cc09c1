"""The bucket that measures a rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.limits import Limit, TokenBucket


def taken(bucket, rate, at):
    """Take a token if there is one."""
    if bucket.wait(rate, now=at):
        return False
    bucket.charge(rate, now=at)
    return True


def test_a_second_s_worth_may_come_at_once():
    """And then one after the other."""
    bucket = TokenBucket()

    assert sum(taken(bucket, 3.0, 10.0) for _ in range(5)) == 3
    assert bucket.wait(3.0, now=10.0) == pytest.approx(1 / 3)
    assert taken(bucket, 3.0, 10.0 + 1 / 3)
    assert not taken(bucket, 3.0, 10.0 + 1 / 3)


def test_a_slow_rate_lets_one_pass_at_a_time():
    """Less than one a second is still one."""
    bucket = TokenBucket()

    assert taken(bucket, 0.1, 5.0)
    assert bucket.wait(0.1, now=5.0) == pytest.approx(10)
    assert not bucket.is_full(now=14.9)
    assert bucket.is_full(now=15.0)


@given(st.floats(0.05, 50), st.lists(st.floats(0, 2), max_size=100))
def test_no_more_than_the_rate_passes_over_any_time(rate, pauses):
    """Beyond the burst at the beginning; and a wait that was said is enough."""
    bucket = TokenBucket()
    now = 100.0
    passed = 0
    for pause in pauses:
        now += pause
        passed += taken(bucket, rate, now)
        if seconds := bucket.wait(rate, now=now):
            assert bucket.wait(rate, now=now + seconds) == 0

    assert passed <= (now - 100.0) * rate + max(1.0, rate) + 1e-6


def test_whose_fault_a_limit_is():
    """It decides between 429 and 503."""
    assert {limit for limit in Limit if limit.is_the_keys} == {Limit.KEY_RATE, Limit.KEY_CONCURRENCY, Limit.KEY_TOKENS}
