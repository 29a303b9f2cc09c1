"""What helps a transfer that has failed: a pure decision, whose time is an argument."""

import pytest

from pdrelay_connector.core.transfer.backend import (
    MAX_REBUILDS,
    PERIOD,
    TRANSITIONS,
    BackendEvent,
    BackendHealth,
    BackendState,
    Remedy,
)
from pdrelay_connector.errors import IllegalTransition


@pytest.fixture
def health():
    return BackendHealth()


def rebuild(health, now):
    health.troubled(now=now)
    health.rebuild_begun(now=now)
    health.on(BackendEvent.REBUILT)


@pytest.mark.parametrize("state", BackendState)
@pytest.mark.parametrize("event", BackendEvent)
def test_the_table_is_all_that_happens(health, state, event):
    """What is not in it is a bug, and raises."""
    health.state = state
    if event in TRANSITIONS[state]:
        health.on(event)
        assert health.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition):
            health.on(event)


def test_a_failed_transfer_gets_a_connection_then_a_backend_then_nothing(health):
    health.troubled(now=1.0)
    remedies = [health.remedy(None, since=1.0, now=1.0, kept=0)]
    while remedies[-1] is not Remedy.NONE:
        health.troubled(now=2.0)
        remedies.append(health.remedy(remedies[-1], since=1.0, now=2.0, kept=0))

    assert remedies == [Remedy.RECONNECTION, Remedy.REBUILD, Remedy.NONE]


@pytest.mark.parametrize(("worked", "remedy"), [(0.5, Remedy.REBUILD), (1.5, Remedy.NONE)])
def test_while_others_go_well_it_is_the_peers_matter(health, worked, remedy):
    """A peer that nothing reaches must not cost the transfers with all others their backend."""
    health.troubled(now=1.0)
    health.worked(begun_at=worked)
    health.troubled(now=2.0)

    assert health.remedy(Remedy.RECONNECTION, since=1.0, now=2.0, kept=0) is remedy


@pytest.mark.parametrize(("begun", "state"), [(1.0, BackendState.SUSPECT), (1.1, BackendState.HEALTHY)])
def test_only_what_began_after_the_trouble_shows_that_it_is_over(health, begun, state):
    """The last bytes of a connection may still arrive when the backend is broken."""
    health.troubled(now=1.0)
    health.worked(begun_at=begun)

    assert health.state is state


def test_a_backend_that_others_do_not_mend_has_failed_until_the_first_of_them_is_long_ago(health):
    for number in range(MAX_REBUILDS):
        rebuild(health, float(number))
    health.troubled(now=10.0)

    assert not health.may_rebuild(now=PERIOD - 0.1, kept=0)
    assert health.state is BackendState.FAILED
    assert health.may_rebuild(now=PERIOD, kept=0)
    health.rebuild_begun(now=PERIOD)
    assert not _may_again(health)


def _may_again(health):
    health.on(BackendEvent.REBUILT)
    return health.may_rebuild(now=PERIOD + 0.5, kept=0)


def test_backends_that_hang_do_not_pile_up(health):
    """Each registers the memory once more, and has a thread."""
    health.troubled(now=1.0)

    assert health.may_rebuild(now=1.0, kept=MAX_REBUILDS - 1)
    assert not health.may_rebuild(now=1.0, kept=MAX_REBUILDS)


def test_a_backend_that_has_failed_is_healthy_when_it_works(health):
    """The network may be mended without us."""
    health.troubled(now=1.0)
    health.may_rebuild(now=1.0, kept=MAX_REBUILDS)
    health.worked(begun_at=1.5)

    assert health.state is BackendState.HEALTHY
