"""What of the limits is one worker's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.workers.limit_shares import share_of
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings

GIVEN = Settings(max_concurrency=10, max_queue=3, max_rate=9.0, max_key_concurrency=4, max_key_rate=1.0)


@given(st.integers(1, 64), st.integers(64, 10_000), st.integers(0, 100))
def test_the_shares_of_all_workers_are_the_limit(of, concurrency, queue):
    """Not more, so that it holds; and not less."""
    settings = Settings(max_concurrency=concurrency, max_key_concurrency=concurrency, max_queue=queue, max_rate=7.0)
    shares = [share_of(settings, number, of) for number in range(of)]

    assert sum(one.max_concurrency for one in shares) == concurrency
    assert sum(one.max_key_concurrency for one in shares) == concurrency
    assert sum(one.max_queue for one in shares) == queue
    assert sum(one.max_rate for one in shares) == pytest.approx(7.0)
    assert sum(one.retry_budget_min_rate for one in shares) == pytest.approx(settings.retry_budget_min_rate)
    assert sum(one.max_inflight_bytes for one in shares) <= settings.max_inflight_bytes
    assert min(one.max_concurrency for one in shares) >= 1


def test_what_is_not_limited_stays_so_and_one_worker_has_all():
    """None is no number."""
    shared = share_of(Settings(), 0, 2)

    assert (shared.max_rate, shared.max_key_concurrency, shared.max_key_rate) == (None, None, None)
    assert share_of(GIVEN, 0, 1) == GIVEN


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            Settings(max_concurrency=1),
            "max_concurrency is 1, and there are 2 workers: write at least 2, or fewer",
        ),
        (Settings(max_key_concurrency=1), "max_key_concurrency is 1, and there are 2 workers"),
        (
            Settings(max_inflight_bytes=100, max_body_bytes=60),
            r"max_inflight_bytes is 100 for 2 workers, and one body may have 60 \(max_body_bytes\): write at least 120",
        ),
    ],
)
def test_a_limit_that_cannot_be_shared_is_refused(settings, says):
    """A worker without a place would serve nobody."""
    with pytest.raises(ConfigError, match=says):
        share_of(settings, 1, 2)
