"""What workers tell each other of the engines."""

import msgspec

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.workers.worker_health import MOST, HealthUpdate, WorkerHealth, bulletin_of
from pdrelay_proxy.settings import Settings

D0, D1 = InstanceId("decode-0"), InstanceId("decode-1")
R = RequestId("r")


class Worker:
    """One of several, with two decode engines."""

    def __init__(self, number, engines=2):
        self.number = number
        self.registry = Registry(Settings(circuit_breaker_failures=2, ejection_time_s=5.0))
        for port in range(1, engines + 1):
            self.registry.add(Role.DECODE, Address("http", "h", port))
        self.peers = WorkerHealth(self.registry, patience_s=3.0)

    def says(self):
        """As it arrives."""
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(bulletin_of(self.number, self.registry)), type=HealthUpdate
        )

    def life(self, name=D0):
        return self.registry.member(name).life

    def load(self, name=D0):
        return self.registry.member(name).load

    def breaks(self, *, now):
        for number in range(2):
            self.life().failed(RequestId(f"r{number}"), Failure.UNREACHABLE, now=now)


def test_who_has_nothing_to_say_says_nothing():
    """An idle fleet costs a few bytes."""
    assert Worker(0).says() == HealthUpdate(0, {})


def test_load_is_what_all_workers_have_and_no_more():
    """Each counts its own; one that is heard twice counts once, and one that is silent no more."""
    zero, one, two = Worker(0), Worker(1), Worker(2)
    for number, worker in enumerate((zero, one, two)):
        for request in range(number + 1):
            worker.load().enter(RequestId(f"{number}.{request}"))
    for now in (0.0, 1.0):
        assert zero.peers.hear(one.says(), now=now) == (now == 0.0)
    zero.peers.hear(two.says(), now=2.0)
    assert (zero.load().in_flight, zero.load().own, zero.load().score(now=2.0)) == (6, 1, 6.0)
    assert zero.says().engines[D0].in_flight == 1

    assert zero.peers.expire(now=4.5) == [1]
    assert zero.load().in_flight == 4
    zero.peers.forget(2)
    zero.peers.forget(2)
    assert zero.load().in_flight == 1


def test_what_a_peer_has_no_more_is_not_counted_any_more():
    """A bulletin takes the place of the one before."""
    zero, one = Worker(0), Worker(1)
    one.load().enter(R)
    zero.peers.hear(one.says(), now=0.0)
    one.load().leave(R)
    zero.peers.hear(one.says(), now=0.1)

    assert zero.load().in_flight == 0


def test_an_engine_is_drained_when_it_is_so_for_all_that_are_heard():
    """A peer that has not heard of the order yet may still send it something."""
    zero, one = Worker(0), Worker(1)
    assert zero.peers.is_drained(D0)
    zero.peers.hear(one.says(), now=0.0)
    assert not zero.peers.is_drained(D0)
    one.life().drain(now=1.0)
    one.life().empty("nothing left", now=1.0)
    zero.peers.hear(one.says(), now=1.0)

    assert zero.peers.is_drained(D0)
    assert not zero.peers.is_drained(D1)


def test_what_one_worker_breaks_is_broken_for_all_and_rests_as_long():
    """From the same instant, for the same reason."""
    zero, one = Worker(0), Worker(1)
    one.breaks(now=10.0)
    zero.peers.hear(one.says(), now=10.5)

    assert (zero.life().state, zero.life().since) == (HealthState.EJECTED, 10.0)
    assert zero.life().why == one.life().why == "2 requests in a row failed: the last one did not reach it"
    assert not zero.life().may_serve(now=14.9)
    assert zero.life().may_serve(now=15.0)


def test_a_trial_that_fails_doubles_the_rest_once_for_all():
    """Also where both workers try at the same time."""
    zero, one = Worker(0), Worker(1)
    one.breaks(now=10.0)
    zero.peers.hear(one.says(), now=10.1)
    for number, worker in enumerate((zero, one)):
        assert worker.life().may_serve(now=15.0)
        worker.life().claimed(RequestId(f"trial {number}"))
    zero.life().failed(RequestId("trial 0"), Failure.UNREACHABLE, now=15.2)
    one.peers.hear(zero.says(), now=15.3)
    one.life().failed(RequestId("trial 1"), Failure.UNREACHABLE, now=15.4)

    for worker in (zero, one):
        assert worker.life().state is HealthState.EJECTED
        assert not worker.life().may_serve(now=25.1)
        assert worker.life().may_serve(now=25.2)


def test_old_news_change_nothing():
    """They come again with every bulletin."""
    zero, one = Worker(0), Worker(1)
    one.breaks(now=10.0)
    old = one.says()
    zero.peers.hear(old, now=10.1)
    assert zero.life().may_serve(now=15.0)
    zero.life().claimed(R)
    zero.life().succeeded((R,), now=15.2)
    zero.peers.hear(old, now=15.3)
    assert zero.life().state is HealthState.HEALTHY

    one.peers.hear(zero.says(), now=15.4)
    zero.peers.hear(one.says(), now=15.5)
    assert (zero.life().state, one.life().state) == (HealthState.HEALTHY, HealthState.HEALTHY)


def test_a_drained_engine_stays_drained_whatever_peers_find():
    """An operator's word is not a matter of health; nor is an engine known that others have."""
    zero, one = Worker(0), Worker(1)
    zero.life().drain(now=5.0)
    one.breaks(now=10.0)
    zero.peers.hear(one.says(), now=10.1)
    assert zero.life().state is HealthState.DRAINING
    zero.registry.remove(D0, now=11.0)
    zero.peers.hear(one.says(), now=11.1)

    assert zero.registry.get(D0) is None


def test_a_bulletin_is_bounded_and_says_the_most_important():
    """A datagram has an end: broken engines come before busy ones, busy ones before those that are less so."""
    worker = Worker(0, MOST + 2)
    for number, member in enumerate(worker.registry.members()):
        for request in range(1 + (number == MOST)):
            member.load.enter(RequestId(f"{number}.{request}"))
    last = worker.registry.members()[-1]
    for number in range(2):
        last.life.failed(RequestId(f"r{number}"), Failure.UNREACHABLE, now=1.0)
    data = msgspec.msgpack.encode(bulletin_of(0, worker.registry))
    found = msgspec.msgpack.decode(data, type=HealthUpdate).engines

    assert len(found) == MOST
    assert {last.instance.id, InstanceId(f"decode-{MOST}")} <= found.keys()
    assert len(data) < 200_000
