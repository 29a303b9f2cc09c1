"""What choices cost, by what legs took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, RequestId, Role, RoutingHints
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from pdrelay_proxy.core.schemas import NamedMetrics
from pdrelay_proxy.features.expected_ttft.core.engine_costs import EngineCosts
from pdrelay_proxy.features.expected_ttft.core.engine_speed import EngineSpeeds
from pdrelay_proxy.io.request_path.live_fleet import Caches


class Bench:
    """Two engines of each role, and a clock that is moved by hand."""

    def __init__(self, itl_most_s=None):
        self.now, self.registry = 0.0, Registry()
        for port in (1, 2):
            for role in Role:
                self.registry.add(role, Address("http", str(role), port))
        (self.p, self.q), (self.d, self.e) = (self.registry.known(role) for role in Role)
        caches = Caches(PromptMemory(1800.0), self.registry, lambda: self.now)
        self.speeds = EngineSpeeds()
        self.costs = EngineCosts(
            self.registry, self.speeds, caches, lambda: self.now, weight=8.0, itl_most_s=itl_most_s
        )  # fmt: skip
        self.count = 0

    def send(self, engine, ask, *, computes=True):
        self.count += 1
        request = RequestId(f"r{self.count}")
        self.costs.leg_sent(engine, request, ask, computes=computes, is_timed=True)
        return request

    def serve(self, engine, ask, seconds, *, computes=True, counted=None):
        request = self.send(engine, ask, computes=computes)
        self.now += seconds
        self.costs.prompt_computed(engine, request, ask, counted)
        self.speed(engine.id).leave(request, self.now)

    def speed(self, name):
        return self.speeds.for_member(self.registry.member(name))

    def play(self, kind, instance, request, size, passed):
        """Have something happen to a request at an engine."""
        match kind:
            case "reserved":
                self.costs.slot_held(instance, request)
            case "answered":
                self.costs.prompt_computed(instance, request, ask(size), size or None)
            case "left":
                if (member := self.registry.get(instance.id)) is not None:
                    self.speeds.for_member(member).leave(request, self.now)
            case "removed":
                if self.registry.get(instance.id) is not None:
                    self.registry.remove(instance.id, now=self.now)
            case "stepped":
                self.costs.stepped(instance.id, [passed])
            case _:
                self.costs.leg_sent(instance, request, ask(size), computes=kind == "sent", is_timed=kind != "untimed")


def ask(size, text=b"x"):
    return RoutingHints("m", prompt=b'"%b"' % (text * size))


def test_what_waits_counts_in_tokens():
    """One prompt of 100,000 tokens is more than twenty of ten."""
    bench = Bench()
    bench.send(bench.p, ask(400_000))
    for number in range(20):
        bench.send(bench.q, ask(40, b"%d" % (number % 10)))

    assert (
        bench.costs.prefill(bench.p, ask(40, b"y")).queue_s > 100 * bench.costs.prefill(bench.q, ask(40, b"y")).queue_s
    )


def test_what_an_engine_has_is_not_computed_again():
    """So a conversation stays where it is, as long as that is faster."""
    bench = Bench()
    bench.serve(bench.p, ask(8000), 0.2)

    assert bench.costs.prefill(bench.p, ask(8000)).prefill_s < 0.5 * bench.costs.prefill(bench.q, ask(8000)).prefill_s
    assert bench.costs.prefill(bench.p, ask(8000)).prefill_hit > 1900


def test_a_slower_engine_is_found_out():
    """By nothing but the time its legs took."""
    bench = Bench()
    for number in range(20):
        bench.serve(bench.p, ask(4000 + number, b"a"), 0.1)
        bench.serve(bench.q, ask(4000 + number, b"b"), 0.2)
        for engine in (bench.p, bench.q):
            bench.registry.member(engine.id).life.cache_since = bench.now  # it forgets, so that all is new

    quick, slow = (bench.costs.prefill(each, ask(4000, b"c")).prefill_s for each in (bench.p, bench.q))
    assert slow == pytest.approx(2 * quick, rel=0.15)


def test_the_requests_of_other_routers_count_as_its_own_ones_do():
    """As the engine says how many wait, which are more than this router has sent."""
    bench = Bench()
    bench.serve(bench.p, ask(4000), 0.1)
    before = bench.costs.prefill(bench.p, ask(40, b"y")).queue_s
    bench.registry.member(bench.p.id).load.reported(NamedMetrics(10.0), now=bench.now)

    assert before == 0
    assert bench.costs.prefill(bench.p, ask(40, b"y")).queue_s > 0
    bench.now += 10  # the report is too old
    assert bench.costs.prefill(bench.p, ask(40, b"y")).queue_s == 0


def test_what_a_decode_engine_has_need_not_be_moved():
    """And each stream that it has makes the next token later."""
    bench = Bench()
    bench.serve(bench.d, ask(80_000), 1.0, computes=False)
    for _ in range(50):
        bench.costs.slot_held(bench.e, RequestId(f"s{_}"))

    has, has_not = bench.costs.decode(bench.d, ask(80_000)), bench.costs.decode(bench.e, ask(80_000))
    assert has.transfer_s < 0.5 * has_not.transfer_s
    assert has.decode_s < has_not.decode_s


@pytest.mark.parametrize(("itl_most_s", "size", "spares"), [(0.03, 400, True), (0.03, 40_000, False), (None, 4, False)])
def test_a_decode_engine_computes_what_its_streams_can_bear(itl_most_s, size, spares):
    """The pause is that of the tokens, and never above the setting; without the setting there is none."""
    bench = Bench(itl_most_s)

    assert bench.costs.spares(bench.costs.alone(bench.d, ask(size))) is spares


def test_what_is_on_its_way_is_not_there_for_an_engine_that_serves_alone():
    """The KV of a request under way may never arrive."""
    bench = Bench()
    bench.send(bench.d, ask(8000), computes=False)

    assert bench.costs.alone(bench.d, ask(8000)).decode_hit == 0


def test_tokens_are_those_that_engines_count():
    """A token of another tokenizer has other bytes."""
    bench = Bench()
    bench.serve(bench.p, ask(998), 0.1, counted=500)

    assert bench.costs.prefill(bench.q, ask(1998)).tokens == 1000


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["reserved", "sent", "loads", "untimed", "answered", "left", "removed", "stepped"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 5000),
        st.floats(0, 100),
    ),
    max_size=40,
)


@given(EVENTS)
def test_after_any_sequence_nothing_is_queued_and_every_cost_is_a_number(events):
    """Engines come and go, legs are dropped, clients hang up."""
    bench = Bench(0.05)
    engines = [bench.p, bench.q, bench.d, bench.e]
    for kind, engine, request, size, passed in events:
        bench.now += passed
        instance = engines[engine]
        bench.play(kind, instance, RequestId(f"r{request}"), size, passed)
        for cost in (bench.costs.prefill, bench.costs.decode, bench.costs.alone):
            assert 0 <= cost(instance, ask(size)).cost_s < 1e9
    for member in bench.registry.members():
        for request in range(4):
            bench.speeds.for_member(member).leave(RequestId(f"r{request}"), bench.now)

        speed = bench.speeds.for_member(member)
        assert (speed.computing.tokens, speed.loading.tokens) == (0, 0)
        assert not speed.entered


def test_rates_of_an_engine_that_turns_are_learned_anew():
    """What it took as a decode engine says nothing of it as a prefill engine beside others of that kind."""
    bench = Bench()
    request = bench.send(bench.d, ask(400))
    bench.registry.departures.change_role(bench.d.id, EngineRole.PREFILL, now=0.0)
    bench.registry.settle(patience_s=0, now=0.0)
    bench.costs.stream_begun(bench.d, request, ask(400))
    bench.costs.left(bench.d, request)
    speed = bench.speed(bench.d.id)

    assert (speed.prefill.line, speed.entered, len(speed.computing)) == (None, set(), 0)


def test_what_was_measured_of_an_engine_goes_with_it():
    """Another one with its name begins anew, and fleets that change do not grow what is remembered."""
    bench = Bench()
    bench.serve(bench.p, ask(400), 0.1)
    member = bench.registry.member(bench.p.id)
    assert bench.speeds.find(member).prefill.line is not None
    bench.registry.remove(bench.p.id, now=bench.now)
    again = bench.registry.add(Role.PREFILL, Address("http", str(Role.PREFILL), 1))

    assert bench.speeds.find(bench.registry.member(again.id)) is None
    bench.now += 10
    bench.serve(bench.q, ask(400), 0.1)
    assert set(bench.speeds._stints) <= {member.instance.id for member in bench.registry.members()}
