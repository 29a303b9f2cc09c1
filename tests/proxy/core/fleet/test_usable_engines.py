"""Who is known and who is usable, after any changes, is what asking each engine would bring."""

import contextlib
import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import EngineRole, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.settings import Settings

LIMITS = {"circuit_breaker_failures": 1, "ejection_time_s": 2.0, "health_check_failures": 2}
PLACE = st.integers(0, 11)
FACTS = st.builds(
    EngineCapabilities,
    models=st.sampled_from([None, frozenset("a"), frozenset("ab"), frozenset("b")]),
    version=st.sampled_from([None, None, "1", "2"]),
    mode=st.sampled_from([None, None, EngineMode.PULL, EngineMode.PUSH]),
    engine_id=st.sampled_from([None, "x", "y"]),
    incompatible=st.sampled_from([None, None, frozenset("x"), frozenset("xy")]),
    slice=st.sampled_from([None, "z1", "z2"]),
)
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(Role), st.sampled_from(["", "#revision=r", "#slice=z1", "#dp=2"])),
    st.tuples(st.just("remove"), PLACE),
    st.tuples(st.just("drain"), PLACE),
    st.tuples(st.just("undrain"), PLACE),
    st.tuples(st.just("learn"), PLACE, FACTS),
    st.tuples(st.just("fail"), PLACE),
    st.tuples(st.just("see"), PLACE),
    st.tuples(st.just("miss"), PLACE),
    st.tuples(st.just("turn"), PLACE, st.sampled_from(EngineRole)),
    st.tuples(st.just("rest"), PLACE, PLACE),
    st.tuples(st.just("work"), PLACE, PLACE),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0])),
)


class World:
    """A fleet, and what happens to its engines."""

    def __init__(self):
        self.now, self.ports = 0.0, itertools.count(1)
        self.registry = Registry(Settings(**LIMITS))

    def add(self, role, fragment):
        target = Target.parse(f"http://h:{next(self.ports)}{fragment}")
        self.registry.add_target(role, target, now=self.now)

    def at(self, place):
        members = self.registry.members()
        return members[place % len(members)] if members else None

    def happens(self, event, *about):
        """Have something happen to the fleet, or to one of its engines, if there is one."""
        if event == "add":
            self.add(*about)
        elif event == "wait":
            self.now += about[0]
        elif (member := self.at(about[0])) is not None:
            with contextlib.suppress(ProxyError):  # it cannot turn, or another one is at its address
                getattr(self, event)(member, *about[1:])

    def remove(self, member):
        self.registry.remove(member.instance.id, now=self.now)

    def drain(self, member):
        self.registry.departures.drain(member.instance.id, now=self.now)

    def undrain(self, member):
        self.registry.departures.undrain(member.instance.id, now=self.now)

    def learn(self, member, facts):
        self.registry.learn(member.instance.id, facts)

    def fail(self, member):
        member.life.failed(RequestId("r"), Failure.UNREACHABLE, now=self.now)

    def see(self, member):
        member.life.seen(now=self.now)

    def miss(self, member):
        member.life.missed("why", now=self.now)

    def turn(self, member, to):
        self.registry.departures.change_role(member.instance.id, to, now=self.now, at_once=True)

    def rest(self, member, place):
        avoided = frozenset({member.instance.id})
        self.registry.learn(self.at(place).instance.id, EngineCapabilities(resting=avoided))

    def work(self, member, place):
        self.registry.learn(self.at(place).instance.id, EngineCapabilities(resting=frozenset()))


@given(st.lists(st.tuples(EVENTS, st.booleans()), max_size=40))
def test_who_is_usable_is_what_asking_each_engine_brings(events):
    """The registry keeps lists of who serves a role; they are in the order in which engines were added."""
    world = World()
    for event, asked in events:
        world.happens(*event)
        if not asked:
            continue
        for role in Role:
            rows = [(member, member.as_role(role)) for member in world.registry.members()]
            expected = [one for member, one in rows if one is not None and member.life.may_serve(now=world.now)]
            assert [*world.registry.known(role)] == [one for _, one in rows if one is not None]
            if expected:
                assert [*world.registry.usable(role, now=world.now)] == expected
        lives = [member.life for member in world.registry.members()]
        assert world.registry.steady_until == min([life.steady_until for life in lives], default=float("inf"))
