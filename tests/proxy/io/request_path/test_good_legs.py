"""Good legs are counted for each engine at a time, and none is lost or counted twice."""

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, RequestId, Role
from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from pdrelay_proxy.io.request_path.good_legs import GoodLegs

P, D = (Instance(InstanceId(f"{role}-0"), role, Address("http", "h", 1)) for role in Role)


def counting():
    """Return what takes legs, what they wait in, and what was counted."""
    later = DeferredCalls()
    counted = []
    legs = GoodLegs(later, lambda legs: counted.append((legs.instance, legs.answered, legs.answered_s, legs.over_s)))
    return legs, later, counted


async def test_the_legs_of_an_engine_are_counted_together():
    legs, later, counted = counting()
    legs.over(P, "/x", RequestId("a"), 1.0, 2.0, 10.0)
    legs.answered(D, "/x", RequestId("a"), 3.0, 11.0)
    legs.over(P, "/x", RequestId("b"), 4.0, 5.0, 12.0)
    legs.ended(D, 6.0, 13.0, True)
    assert counted == []

    later.settle()

    assert counted == [(P, ["a", "b"], [1.0, 4.0], [2.0, 5.0]), (D, ["a"], [3.0], [6.0])]


async def test_what_comes_after_they_were_counted_is_counted_next():
    legs, later, counted = counting()
    legs.over(P, "/x", RequestId("a"), 1.0, 2.0, 10.0)
    later.settle()
    legs.ended(P, 3.0, 11.0, True)
    assert len(counted) == 1

    later.settle()

    assert counted[1:] == [(P, [], [], [3.0])]


async def test_a_leg_that_was_dropped_does_not_show_that_answers_come_to_their_end():
    """Its client has left."""
    later = DeferredCalls()
    ends = []
    legs = GoodLegs(later, lambda legs: ends.append(legs.is_complete))
    for is_complete in (False, True):
        legs.ended(D, 6.0, 13.0, False)
        legs.ended(D, 6.0, 13.0, is_complete)
        later.settle()

    assert ends == [False, True]
