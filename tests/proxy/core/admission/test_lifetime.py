"""The life of the router process."""

import itertools

import pytest

from pdrelay_proxy.core.admission.lifetime import TRANSITIONS, Lifetime, Stage, Step


@pytest.mark.parametrize(("stage", "step"), list(itertools.product(Stage, Step)))
def test_the_whole_table(stage, step):
    """The grace cannot be over before it has begun."""
    lifetime = Lifetime()
    lifetime.stage = stage
    if step in TRANSITIONS[stage]:
        lifetime.on(step)
        assert lifetime.stage is TRANSITIONS[stage][step]
    else:
        with pytest.raises(KeyError):
            lifetime.on(step)


def test_there_is_no_way_back():
    """A router that has said it ends does end."""
    order = list(Stage)

    assert all(order.index(after) >= order.index(stage) for stage in Stage for after in TRANSITIONS[stage].values())


def test_requests_are_counted_however_they_end():
    """The end waits for them."""
    lifetime = Lifetime()
    seen = []

    def fail():
        with lifetime.serving():
            seen.append(lifetime.in_flight)
            raise ValueError("x")

    with lifetime.serving(), pytest.raises(ValueError, match="x"):
        fail()

    assert seen == [2]
    assert lifetime.in_flight == 0
