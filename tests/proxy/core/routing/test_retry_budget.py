"""How many retries all requests together may cause."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.routing.retries import RetryBudget


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=300))
def test_retries_are_never_more_than_their_share_and_the_floor(steps):
    """Whatever the order: at most 20 % of the requests, one a second, and what the bucket held at first."""
    budget = RetryBudget(share=0.2, floor=1.0, most=20.0)
    now = 0.0
    requests = 0
    granted = 0
    for pause, is_request in steps:
        now += pause
        if is_request:
            budget.came(now=now)
            requests += 1
        else:
            granted += budget.grants(now=now)

    assert granted <= 20 + 0.2 * requests + now + 1e-6


def test_when_everything_fails_engines_see_little_more_than_the_requests():
    """1,000 requests in a second that each would like two more tries."""
    budget = RetryBudget()
    granted = 0
    for number in range(1000):
        budget.came(now=number / 1000)
        granted += sum(budget.grants(now=number / 1000) for _ in range(2))

    assert 200 <= granted <= 1000 * 0.2 + 20 + 1


def test_quiet_times_still_have_retries():
    """One request in a minute that fails is sent again."""
    budget = RetryBudget()
    for number in range(100):
        budget.came(now=number * 60.0)
        assert budget.grants(now=number * 60.0)
