"""What is kept of routers that are silent."""

from pdrelay_proxy.core.departed_routers import DepartedRouters


def test_a_sequence_is_kept_for_as_long_as_datagrams_are_good_and_no_longer():
    """Twice the 30 s that clocks may differ by."""
    departed = DepartedRouters()
    departed.add(b"a", 7, now=0.0)
    departed.add(b"b", 9, now=1.0)

    departed.expire(now=60.0)
    assert [departed.sequence(router) for router in (b"a", b"b", b"c")] == [7, 9, 0]

    departed.expire(now=60.5)
    assert [departed.sequence(router) for router in (b"a", b"b")] == [0, 9]


def test_a_router_that_is_back_is_forgotten_and_may_go_once_more():
    """With what it has sent meanwhile."""
    departed = DepartedRouters()
    departed.add(b"a", 7, now=0.0)
    departed.remove(b"a")
    assert departed.sequence(b"a") == 0

    departed.add(b"a", 8, now=50.0)
    departed.expire(now=100.0)
    assert departed.sequence(b"a") == 8


def test_there_is_a_bound_and_who_went_first_is_forgotten_first():
    """Whatever a fleet does that starts its routers again and again."""
    departed = DepartedRouters()
    for number in range(1025):
        departed.add(number.to_bytes(8, "big"), 1, now=0.0)

    assert [departed.sequence(number.to_bytes(8, "big")) for number in (0, 1, 1024)] == [0, 1, 1]
