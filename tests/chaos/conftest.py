"""One set of engines for all chaos tests, for each way of moving KV."""

import pytest

from support.netns import lab_available, lab_or_none
from support.victims import make_victims


@pytest.fixture(scope="package", params=["pull", "push"])
def mode(request):
    """Who moves the blocks. What holds for one holds for the other."""
    return request.param


@pytest.fixture(scope="package")
def lab():
    """Two hosts with a network between them that can be cut, or None where that cannot be had."""
    with lab_or_none() as lab:
        yield lab


@pytest.fixture(scope="package")
def all_victims(fleet, model, mode, lab, reference):
    victims = make_victims(fleet, model, mode, lab)
    try:
        victims.ready()
        victims.note_idle_cores()  # now: nobody has met anybody
        yield victims
    finally:
        victims.stop()


@pytest.fixture
def victims(all_victims):
    """The engines, alive and at rest."""
    all_victims.ready()
    return all_victims


@pytest.fixture
def network(lab, victims):
    """The link between P and D, whole again after the test."""
    if lab is None:
        pytest.skip(f"no network lab: {lab_available()}")
    yield lab
    lab.heal()
    lab.limit(None)


@pytest.fixture
def p(victims):
    return victims.p


@pytest.fixture
def d(victims):
    """The decode engine that recomputes, when a test needs just one."""
    return victims.hasty["recompute"]
