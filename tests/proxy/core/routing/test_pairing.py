"""Who may share a request with whom."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, fit
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.group_weights import GroupTurns
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.errors import BadRequest, NoInstance, UnknownModel
from pdrelay_proxy.settings import Settings

ports = itertools.count(1)

BRITTLE = Settings(circuit_breaker_failures=1, ejection_time_s=5)


def fleet(prefill, decode, *, limits=None):
    """A registry with these facts, and a pairing on it."""
    registry = Registry(limits)
    for role, all_facts in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for facts in all_facts:
            registry.add(role, Address("http", "h", next(ports) % 60000 + 1), facts=facts)
    return registry, PairSelector(registry, GroupChoice(RoundRobin()))


def names(pair):
    return tuple(instance.id for instance in pair)


def choose(registry, pairs, ask=None, count=1):
    """Return the pairs of so many turns."""
    chosen = []
    for _ in range(count):
        usable = [registry.usable(role) for role in Role]
        chosen.append(names(pairs.pair(*usable, ask or RoutingHints())))
    return chosen


def serving(*models, **facts):
    return EngineCapabilities(frozenset(models), **facts)


def test_a_request_goes_to_engines_that_serve_its_model():
    """Several models behind one router; whatever a request names, two engines of no common model never meet."""
    registry, pairs = fleet([serving("a"), serving("b"), serving("a", "lora")], [serving("b"), serving("a", "lora")])

    assert set(choose(registry, pairs, RoutingHints(model="a"), 8)) == {
        ("prefill-0", "decode-1"),
        ("prefill-2", "decode-1"),
    }
    assert set(choose(registry, pairs, RoutingHints(model="b"), 8)) == {("prefill-1", "decode-0")}
    assert set(choose(registry, pairs, RoutingHints(model="lora"), 8)) == {("prefill-2", "decode-1")}
    assert set(choose(registry, pairs, RoutingHints(), 12)) == {
        ("prefill-0", "decode-1"),
        ("prefill-1", "decode-0"),
        ("prefill-2", "decode-1"),
    }


SETS = st.sampled_from([None, ("a",), ("b",), ("a", "alias"), ("alias",), ("a", "x"), ("b", "x")])


@given(
    st.lists(SETS, min_size=1, max_size=4),
    st.lists(SETS, min_size=1, max_size=4),
    st.sampled_from([None, "a", "b", "x"]),
    st.booleans(),
    st.sampled_from(Role),
)
def test_no_two_engines_meet_whose_base_models_are_known_to_be_two(prefill, decode, model, again, lender):
    """In pairs, of retries, of readers of a lender, and of those that get a leg that could not be sent: ``x`` is an
    adapter, and two base models may have one of that name."""

    def facts(names):
        adapters = frozenset({"x"}) & frozenset(names or ())
        return EngineCapabilities() if names is None else serving(*names, adapters=adapters)

    registry, pairs = fleet(map(facts, prefill), map(facts, decode))
    bases = {member.instance.id: member.facts.bases for member in registry.members()}
    try:
        chosen = set(choose(registry, pairs, RoutingHints(model, again=again), 12))
    except (NoInstance, UnknownModel):
        chosen = set()
    first = registry.known(lender)[0]
    fitting = {(first.id, other.id) for other in registry.fitting(first, registry.known(Role.DECODE))}

    for one, other in chosen | fitting:
        assert bases[one] is None or bases[other] is None or bases[one] & bases[other]


def test_an_unknown_model_is_told_with_those_that_are_known():
    """The client has misspelt it."""
    registry, pairs = fleet([serving("a")], [serving("a", "b")])
    with pytest.raises(UnknownModel, match="the model 'c' is not served here; there is a, b"):
        choose(registry, pairs, RoutingHints(model="c"))


def test_an_engine_whose_models_are_not_known_yet_may_serve_any():
    """Before its first probe, or when it does not list them: it says itself what it lacks."""
    registry, pairs = fleet([EngineCapabilities()], [serving("a")])

    assert choose(registry, pairs, RoutingHints(model="a")) == [("prefill-0", "decode-0")]


def test_a_model_that_only_one_side_serves_cannot_be_split():
    """No prefill engine: the relay may have one engine serve it alone."""
    registry, pairs = fleet([serving("a")], [serving("a", "b")])
    with pytest.raises(NoInstance, match="no prefill instance serves the model 'b'"):
        choose(registry, pairs, RoutingHints(model="b"))

    assert pairs.choose(registry.usable(Role.DECODE), RoutingHints(model="b")).id == "decode-0"


def test_a_model_whose_engines_are_broken_is_known_all_the_same():
    """503 and not 404: it will be back."""
    registry, pairs = fleet([serving("a")], [serving("a"), serving("b")])
    life = registry.member(registry.known(Role.DECODE)[1].id).life
    life.missed("cannot be reached", now=0)
    with pytest.raises(NoInstance, match="would do can take a request now: decode-1 is starting"):
        choose(registry, pairs, RoutingHints(model="b"))


VERSIONS = [EngineCapabilities(version=v) for v in ("0.31", "0.32", None)]


@given(
    st.lists(st.sampled_from(VERSIONS), min_size=1, max_size=4),
    st.lists(st.sampled_from(VERSIONS), min_size=1, max_size=4),
    st.booleans(),
)
def test_engines_that_do_not_fit_never_meet_and_all_others_do(prefill, decode, each_leg):
    """During an upgrade both versions serve, each among themselves."""
    registry, pairs = fleet(prefill, decode)
    if each_leg:
        pairs = PairSelector(registry, GroupChoice(PolicyPerLeg(LeastLoaded(lambda _: 0.0), RoundRobin())))
    fitting = {
        (f"prefill-{i}", f"decode-{j}")
        for (i, p), (j, d) in itertools.product(enumerate(prefill), enumerate(decode))
        if fit(p, d)
    }
    if not fitting:
        with pytest.raises(NoInstance, match="no prefill instance fits a decode instance"):
            choose(registry, pairs)
        return
    chosen = set(choose(registry, pairs, count=100))

    assert chosen <= fitting
    assert each_leg or chosen == fitting
    assert {p for p, _ in chosen} == {p for p, _ in fitting}


def test_a_rank_that_a_client_names_is_that_of_the_engine_that_answers():
    """Its cache is there. Prefill engines are chosen as always."""
    registry = Registry()
    for role, rank in itertools.product(Role, range(2)):
        registry.add(role, Address("http", role, 80), rank=rank)
    pairs = PairSelector(registry, GroupChoice(RoundRobin()))
    chosen = choose(registry, pairs, RoutingHints(rank=1), 4)

    assert set(chosen) == {("prefill-0", "decode-1"), ("prefill-1", "decode-1")}
    with pytest.raises(BadRequest, match="X-data-parallel-rank is 2, and no decode instance has this rank"):
        choose(registry, pairs, RoutingHints(rank=2))


def test_the_request_that_finds_an_engine_rested_is_its_trial():
    """Whatever the policy; its partner is one that is well, and no other request is put at risk."""
    registry, pairs = fleet(
        [EngineCapabilities()] * 2,
        [EngineCapabilities()] * 2,
        limits=BRITTLE,
    )
    for role in Role:
        registry.member(registry.known(role)[1].id).life.failed(RequestId("r"), Failure.UNREACHABLE, now=0)
    assert choose(registry, pairs) == [("prefill-0", "decode-0")]

    usable = [registry.usable(role, now=5) for role in Role]
    assert registry.member(usable[0][1].id).life.state is HealthState.HALF_OPEN
    assert names(pairs.pair(*usable)) == ("prefill-1", "decode-0")
    assert pairs.choose(usable[1]).id == "decode-1"


def test_a_request_that_has_failed_already_is_nobodys_trial():
    """It is on its last chances; only if nobody is well it goes to who is to be tried."""
    registry, pairs = fleet(
        [EngineCapabilities()] * 2,
        [EngineCapabilities()] * 2,
        limits=BRITTLE,
    )
    for role in Role:
        registry.member(registry.known(role)[0].id).life.failed(RequestId("r"), Failure.UNREACHABLE, now=0)
    usable = [registry.usable(role, now=5) for role in Role]
    again = RoutingHints(again=True)

    assert {names(pairs.pair(*usable, again)) for _ in range(4)} == {("prefill-1", "decode-1")}
    assert {pairs.choose(usable[1], again).id for _ in range(4)} == {"decode-1"}
    assert pairs.choose(usable[1][:1], again).id == "decode-0"
    assert names(pairs.pair(usable[0][:1], usable[1][:1], again)) == ("prefill-0", "decode-0")


CHANGES = st.one_of(
    st.tuples(
        st.just("learn"),
        st.integers(0, 4),
        st.sampled_from([EngineCapabilities(version="1"), EngineCapabilities(version="2")]),
    ),
    st.tuples(st.just("learn"), st.integers(0, 4), st.sampled_from([serving("a"), serving("a", "b"), serving("b")])),
    st.tuples(st.sampled_from(["drain", "undrain"]), st.integers(0, 4), st.none()),
    st.tuples(st.just("nothing"), st.just(0), st.none()),
)


def attempt(choice, usable, ask):
    try:
        return names(choice.pair(*usable, ask))
    except (NoInstance, UnknownModel) as error:
        return str(error)


@given(st.lists(st.tuples(CHANGES, st.sampled_from([None, "a", "b"])), max_size=12))
def test_what_is_remembered_changes_no_choice(steps):
    """Whatever is learned, drained or brought back between two requests, as if everything were looked at anew."""
    registry, pairs = fleet([serving("a"), serving("a", "b")], [serving("a"), serving("a", "b"), EngineCapabilities()])
    everyone = [member.instance.id for member in registry.members()]
    anew = pairs.groups.choice.copy()
    turns = GroupTurns()
    for (what, which, facts), model in steps:
        if what == "learn":
            registry.learn(everyone[which], facts)
        elif what != "nothing":
            getattr(registry.departures, what)(everyone[which], now=1.0)
        try:
            usable = [registry.usable(role) for role in Role]
        except NoInstance:
            continue
        for _ in range(2):
            fresh = PairSelector(registry, GroupChoice(anew, turns=turns))
            expected = attempt(fresh, usable, RoutingHints(model=model))
            assert attempt(pairs, usable, RoutingHints(model=model)) == expected


def test_what_is_remembered_is_bounded():
    """Clients can think of models without end, and an engine that does not say what it serves may serve any."""
    registry, pairs = fleet([EngineCapabilities()], [EngineCapabilities()])
    for number in range(200):
        choose(registry, pairs, RoutingHints(model=str(number)))

    assert sum(len(each.narrowed_by_key) for each in pairs._parts) <= 64


def test_the_engine_that_is_on_trial_is_the_one_whose_time_alone_counts():
    """It gets the request if one engine is faster, so another one's time would decide about it."""
    registry, _ = fleet([serving("m")], [serving("m"), serving("m")], limits=BRITTLE)
    tried, well = registry.known(Role.DECODE)
    registry.member(tried.id).life.failed(RequestId("r"), Failure.UNREACHABLE, now=0.0)
    asked = []

    class Weighing:
        latest = None

        def alone(self, _prefill, decode, _ask):
            asked.append(list(decode))
            return True

        def choose(self, among, _ask):
            return among[0]

    choice = Weighing()
    pairs = PairSelector(registry, GroupChoice(choice), weighing=choice)
    usable = [registry.usable(role, now=6.0) for role in Role]
    assert registry.member(tried.id).life.state is HealthState.HALF_OPEN
    assert pairs.is_faster_alone(*usable, RoutingHints())
    assert pairs.is_faster_alone(*usable, RoutingHints(again=True))

    assert asked == [[tried], [well]]
