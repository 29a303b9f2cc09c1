"""A lease that ends before the decode engine has the request costs a second prefill."""

import pytest

from pdrelay_connector.core.doctor.router_times import RouterTimes, diagnose_router


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (RouterTimes(), []),
        (RouterTimes(lease=14.0), ["lease-handoff"]),
        (RouterTimes(handoffs=100, slow_handoffs=3, slow=20.0), ["slow-handoffs"]),
    ],
)
def test_a_lease_must_outlive_the_hand_over_and_a_step(times, names):
    assert [each.name for each in diagnose_router(times)] == names
