"""What one engine gets while revisions are mixed."""

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, RequestId, Role, RoutingHints
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.group_weights import EACH, GroupShare, Shares
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.session import Session
from pdrelay_proxy.core.routing.share_bound import BURST, ShareBound, ShareBounds
from pdrelay_proxy.io.request_path.live_fleet import Loads
from support.searching import examples


class Fleet:
    """Engines of some revisions, with requests of sessions."""

    def __init__(self, prefill, decode, *, is_bound=True, in_flight=16):
        self.registry = Registry()
        for role, all_facts in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number, facts in enumerate(all_facts):
                port = number + (1 if role is Role.PREFILL else 1000)
                self.registry.add(role, Address("http", "h", port), facts=facts)
        load = Loads(self.registry, lambda: 0.0).of
        choice = PolicyPerLeg(Session(LeastLoaded(load)), Session(LeastLoaded(load)))
        bounds = ShareBounds(self.registry) if is_bound else None
        self.pairs = PairSelector(self.registry, GroupChoice(choice, bounds=bounds))
        self.in_flight, self.open = in_flight, deque()

    def ask(self, session, pairs=None, model="m"):
        usable = [self.registry.usable(role) for role in Role]
        chosen = (pairs or self.pairs).pair(*usable, RoutingHints(model, session), may_be_alone=True)
        return [None if one is None else one.id for one in chosen]

    def serve(self, session, number, model="m"):
        """Ask, and end the oldest request that is one too many."""
        chosen = [name for name in self.ask(session, model=model) if name is not None]
        busy = [name for name in chosen if self.registry.get(name).load.in_flight]
        self.open.append((chosen, RequestId(str(number))))
        for name in chosen:
            self.registry.get(name).load.enter(RequestId(str(number)))
        while len(self.open) > self.in_flight:
            names, request = self.open.popleft()
            for name in names:
                self.registry.get(name).load.leave(request)
        return chosen, busy


def revisions(*names):
    return [EngineCapabilities(version="1", revision=name) for name in names]


MIXED = revisions("1", "1", "2", "2"), revisions(*"11112222")


@settings(max_examples=examples(25), deadline=None)
@given(
    sessions=st.lists(st.integers(0, 8), min_size=60, max_size=200),
    p_new=st.integers(1, 3),
    d_new=st.integers(1, 7),
)
def test_of_any_requests_in_a_row_no_engine_gets_more_than_the_bound(sessions, p_new, d_new):
    """However skewed the sessions are: the bound counts what an engine gets while it has other requests."""
    fleet = Fleet(revisions(*"2" * p_new, *"1" * (4 - p_new)), revisions(*"2" * d_new, *"1" * (8 - d_new)))
    rows = [fleet.serve(f"session {one}", number)[1] for number, one in enumerate(sessions)]

    for begin in range(0, len(rows), 20):
        counts = Counter(name for row in rows[begin:] for name in row)
        window = len(rows) - begin
        for name, count in counts.items():
            size = len(fleet.registry.known(fleet.registry.get(name).instance.role))
            assert count <= EACH * window / size + BURST


def test_a_session_that_is_most_of_the_traffic_is_divided():
    """It has many requests at a time, so it is not one conversation: its engine leaves to the next what is too much."""
    fleet = Fleet(*MIXED)
    counts = Counter()
    for number in range(800):
        chosen, _ = fleet.serve("everyone" if number % 4 else f"session {number}", number)
        counts[chosen[-1]] += 1

    assert 140 < max(counts.values()) <= EACH * 800 / 8 + BURST


def test_a_session_of_one_request_at_a_time_stays_in_a_fleet_that_is_idle():
    """Its engine gets all requests there are, which is many times its share, and is not overloaded by one of them."""
    fleet = Fleet(*MIXED, in_flight=0)

    assert len({fleet.serve("a", number)[0][-1] for number in range(200)}) == 1


def test_the_engine_of_such_a_session_is_not_punished_for_it_later():
    """What it has got while it was idle does not count against it when others come."""
    fleet = Fleet(*MIXED, in_flight=0)
    (mine,) = {fleet.serve("a", number)[0][-1] for number in range(200)}
    fleet.in_flight = 16
    found = [fleet.serve(f"session {number}", number)[0][-1] for number in range(64)]

    assert found.count(mine) >= 3


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (revisions(*"1111"), revisions(*"11111111")),
        (
            [EngineCapabilities(revision="1", slice=name, pairs_within=name) for name in "aabb"],
            [EngineCapabilities(revision="1", slice=name, pairs_within=name) for name in "aabb"],
        ),
        (
            [EngineCapabilities(revision="1", pairs_within=name) for name in ("a", NO_SLICE)],
            [EngineCapabilities(pairs_within=name) for name in ("a", NO_SLICE, "c")],
        ),
    ],
    ids=["one revision", "slices", "slices without partner"],
)
def test_nothing_is_bound_where_revisions_are_not_mixed(prefill, decode):
    """A cache costs nothing in a steady state."""
    bound, free = Fleet(prefill, decode), Fleet(prefill, decode, is_bound=False)

    rows = [[fleet.serve("everyone", number)[0] for number in range(200)] for fleet in (bound, free)]
    assert rows[0] == rows[1]


def rates_of(prefill, decode):
    """Return what each engine may get of requests that all of them can serve."""
    group = CompatibleGroup("a", prefill, decode, float(len(prefill)))
    share = GroupShare(group, alone=not prefill, weight=1.0, limit=1.0)
    return Shares([share], float(len(prefill)), float(len(decode))).rates()


def test_an_engine_that_serves_both_roles_may_get_its_share_of_both():
    """It is counted twice: its legs of both roles are told to one bound."""
    sides = [
        [Instance(InstanceId(f"{number}"), role, Address("http", "h", number + 1)) for number in numbers]
        for role, numbers in ((Role.PREFILL, (0, 1)), (Role.DECODE, (1, 2, 3, 4)))
    ]
    rates = rates_of(*sides)

    assert {name: rates.get(name) for name in "01234"} == pytest.approx(
        {"0": EACH / 2, "1": EACH / 2 + EACH / 4} | dict.fromkeys("234", EACH / 4)
    )


def test_models_are_bound_by_themselves():
    """A fair share is one of the requests that an engine could get: those for other models say nothing."""
    bounds = ShareBounds(Registry())

    assert bounds.of("a") is bounds.of("a")
    assert bounds.of("a") is not bounds.of("b")


def test_models_without_end_are_not_kept():
    """Clients name them."""
    bounds = ShareBounds(Registry())
    first = bounds.of("0")
    for number in range(1000):
        bounds.of(str(number))

    assert bounds.of("0") is not first


def test_adapters_in_turn_keep_the_bound_of_each_engine():
    """All bounds were forgotten beyond 64 names, over and over again: each engine had its burst anew each time."""
    names = [f"lora-{n}" for n in range(100)]
    rounds = 60
    counts = Counter()
    fleet = Fleet(*([replace(facts, models=frozenset(names)) for facts in side] for side in MIXED))
    for number in range(rounds):
        for place, name in enumerate(names):
            counts.update((name, one) for one in fleet.serve("everyone", number * len(names) + place, name)[1])

    for (_, one), count in counts.items():
        assert count <= EACH * rounds / len(fleet.registry.known(fleet.registry.get(one).instance.role)) + BURST


def test_engines_that_are_gone_are_forgotten():
    """A router runs for months."""
    registry = Registry()
    bound = ShareBound(registry)
    for port in range(1, 2000):
        one = registry.add(Role.DECODE, Address("http", "h", port))
        bound.count(rates_of([], [one]), (one,))
        registry.remove(one.id, now=0.0)

    assert 1 <= len(bound._full_at) <= 2


def test_a_rehearsal_leaves_no_trace():
    """``pdrelay instances explain`` asks as often as it likes."""
    asked, quiet = Fleet(*MIXED), Fleet(*MIXED)
    rows = []
    for fleet in (asked, quiet):
        row = []
        for number in range(100):
            if fleet is asked:
                rehearsal = fleet.pairs.copy()
                for _ in range(3):
                    fleet.ask("everyone", rehearsal)
            row.append(fleet.serve("everyone", number)[0])
        rows.append(row)

    assert rows[0] == rows[1]
