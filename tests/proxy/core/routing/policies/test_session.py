"""Sessions stay where they are."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import ANY, Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.policies.session import Session

ENGINES = [Instance(InstanceId(f"d{i}"), Role.DECODE, Address("http", "h", i + 1)) for i in range(6)]
SESSIONS = [RoutingHints(session=f"user-{i}") for i in range(300)]
some = st.lists(st.sampled_from(ENGINES), min_size=1, max_size=6, unique=True)


def homes(engines):
    policy = Session(RoundRobin())
    return {ask.session: policy.choose(engines, ask) for ask in SESSIONS}


@given(some, st.sampled_from(ENGINES))
def test_when_an_engine_comes_or_goes_only_its_own_sessions_move(engines, other):
    """All others keep their cache."""
    without = [one for one in engines if one != other]
    if not without:
        return
    few, more = homes(without), homes([*without, other])

    assert all(few[session] == more[session] for session in few if more[session] != other)


@given(some, st.randoms())
def test_the_order_of_the_engines_does_not_matter(engines, chance):
    """Two routers list them differently and must agree."""
    mixed = [*engines]
    chance.shuffle(mixed)

    assert homes(engines) == homes(mixed)


def test_ids_do_not_matter_and_ranks_do():
    """Ids are given by each router, and anew after a restart; ranks have caches of their own."""
    renamed = [Instance(InstanceId(f"x{i}"), Role.DECODE, one.address) for i, one in enumerate(ENGINES)]
    ranks = [Instance(InstanceId(f"r{i}"), Role.DECODE, ENGINES[0].address, i) for i in range(4)]

    assert [home.address for home in homes(ENGINES).values()] == [home.address for home in homes(renamed).values()]
    assert len(set(homes(ranks).values())) == 4


def test_every_engine_gets_its_share():
    """300 sessions on 6 engines: about 50 each."""
    counts = Counter(home.id for home in homes(ENGINES).values())

    assert all(25 <= counts[one.id] <= 80 for one in ENGINES)


def test_a_session_that_came_before_is_not_hashed_for_each_engine_again():
    """With a thousand engines that takes a millisecond, in which all other requests wait."""
    hashed = Counter()

    class Place:
        def __init__(self, number):
            self.number = number

        @property
        def authority(self):
            hashed[self.number] += 1
            return f"h:{self.number}"

    engines = [Instance(InstanceId(f"d{i}"), Role.DECODE, Place(i)) for i in range(6)]
    policy = Session(RoundRobin())
    homes = {policy.choose(engines, SESSIONS[0]).id for _ in range(3)}

    assert len(homes) == 1
    assert set(hashed.values()) == {1}
    assert policy.choose(engines[:1], SESSIONS[0]) is engines[0]


def test_without_a_session_the_other_policy_chooses():
    """And takes its turns."""
    policy = Session(RoundRobin())

    assert [policy.choose(ENGINES, ANY) for _ in range(6)] == ENGINES
    assert policy.copy().choose(ENGINES) == policy.choose(ENGINES)
