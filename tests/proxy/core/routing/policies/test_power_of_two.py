"""The less loaded of two."""

import random

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.routing.policies.power_of_two import PowerOfTwo

ENGINES = [Instance(InstanceId(f"d{i}"), Role.DECODE, Address("http", "h", i + 1)) for i in range(8)]


def index(one):
    return int(one.id[1:])


@given(st.integers(2, 8), st.data())
def test_the_two_are_different_and_the_busier_one_loses(count, data):
    """Otherwise chance alone would choose."""
    drawn = []

    def dice(sides):
        drawn.append(data.draw(st.integers(0, sides - 1)))
        return drawn[-1]

    chosen = PowerOfTwo(index, dice).choose(ENGINES[:count])
    first = drawn[0]
    second = (drawn[0] + 1 + drawn[1]) % count

    assert first != second
    assert index(chosen) == min(first, second)


def test_one_engine_needs_no_dice():
    """There is nothing to choose."""
    assert PowerOfTwo(index, lambda _: 1 / 0).choose(ENGINES[:1]) == ENGINES[0]


def test_the_load_comes_out_nearly_even_and_nobody_starves():
    """The reason for two: with one, the busiest of 8 would be far above the mean."""
    load = dict.fromkeys([one.id for one in ENGINES], 0)
    policy = PowerOfTwo(lambda one: load[one.id], random.Random(7).randrange)
    for _ in range(4000):
        load[policy.choose(ENGINES).id] += 1

    assert max(load.values()) - min(load.values()) <= 8
