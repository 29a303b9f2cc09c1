"""Limits that are the fleet's: what each router lets in counts for all."""

import random

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.fair_shares import BYTES_PER_TOKEN
from pdrelay_proxy.features.peers.core.datagrams import DatagramFault
from pdrelay_proxy.features.peers.core.peer_exchange import PeerExchange
from pdrelay_proxy.features.peers.core.quota_payload import QUOTAS, QuotaPayload
from pdrelay_proxy.settings import Settings
from support.introduced import introduced

SECRET = b"of this fleet"
NAMES = ("a", "b")
WALL = 1000.0


class OneRouter:
    """An admission, and its side of the exchange."""

    def __init__(self, number, *, has_other_routers=True, **limits):
        self.admission = Admission(Settings(**limits), has_other_routers=has_other_routers)
        self.quotas = QuotaPayload(self.admission, lambda: NAMES)
        self.exchange = PeerExchange(bytes([number]) * 8, SECRET, {QUOTAS: self.quotas})

    def serve(self, key, *, tokens=0, now=0.0, prompt=0):
        """Serve a request at once; return whether it was let in."""
        ticket = self.admission.arrive(key, 0, prompt * BYTES_PER_TOKEN, now=now)
        if ticket.refusal is not None:
            return False
        self.admission.leave(ticket, tokens, now=now)
        return True

    def says(self):
        return self.exchange.sealed(QUOTAS, self.quotas.bodies(), wall=WALL)

    def hears(self, datagrams, *, now=0.0, wall=WALL):
        return [self.exchange.receive(data, now=now, wall=wall) for data in datagrams]


def fleet(count, **limits):
    return met(*[OneRouter(number, **limits) for number in range(count)])


def met(*routers, now=0.0):
    """Have routers name each other."""
    introduced(*[router.exchange for router in routers], now=now)
    return routers


def tell(routers, *, now=0.0, lost=lambda: False):
    for sender in routers:
        for data in sender.says():
            for other in routers:
                if not lost():
                    assert other.hears([data], now=now) in ([None], [DatagramFault.LATE])


def test_tokens_that_one_router_served_count_at_the_others():
    """And of that key alone."""
    one, other = fleet(2, max_key_tokens_per_minute=600)
    one.serve("a", tokens=1200)
    tell([one, other])

    assert not other.serve("a", now=1.0)
    assert other.serve("b", now=1.0)
    assert other.serve("a", now=61.0)


def test_requests_count_by_key_and_all_together():
    """As max_key_rate and max_rate say."""
    one, other = fleet(2, max_key_rate=5.0, max_rate=8.0)
    for _ in range(5):
        assert one.serve("a")
    tell([one, other])
    assert not other.serve("a")
    assert [other.serve("b") for _ in range(4)] == [True, True, True, False]


@given(st.integers(0, 10_000), st.integers(2, 5), st.floats(0, 0.6))
def test_in_the_long_run_the_fleet_keeps_the_limit(seed, count, loss):
    """Whatever datagrams are lost: over it by what all let in within the seconds in which they know nothing."""
    dice = random.Random(seed)
    quota = 600
    cost = 100
    routers = fleet(count, max_key_tokens_per_minute=quota)
    tokens = 0
    for second in range(240):
        for router in routers:
            tokens += cost * router.serve("a", tokens=cost, now=float(second))
        tell(routers, now=float(second), lost=lambda: dice.random() < loss)

    fresh = count * (quota + cost)
    assert tokens <= fresh + 240 * quota / 60 * (1 + loss) + 20 * count * cost * loss
    assert tokens >= 240 * quota / 60 * 0.8


def test_a_router_that_is_not_heard_leaves_each_its_share():
    """The limit is not multiplied by a network that is cut."""
    one = OneRouter(1, max_key_tokens_per_minute=600)
    one.admission.share = 1 / 3
    one.serve("a", tokens=200)

    assert not one.serve("a", now=0.0)
    assert one.serve("a", now=1.1)


def test_a_router_that_starts_is_not_charged_what_was_served_before():
    """The others have counted for days."""
    one, late = fleet(2, max_key_tokens_per_minute=600)
    for minute in range(50):
        one.serve("a", tokens=600, now=minute * 61.0)
        told = one.says()
    late.hears(told, now=3000.0)

    assert not late.serve("a", now=3000.0)  # of the latest
    assert late.serve("a", now=3001.0)


def test_a_count_is_told_some_times_and_then_not_again():
    """What has not changed need not be said for ever."""
    one = OneRouter(1, max_key_tokens_per_minute=600)
    one.serve("a", tokens=5)
    told = [len(one.says()) for _ in range(8)]

    assert told == [1] * 5 + [0] * 3
    one.serve("a", tokens=5)
    assert len(one.says()) == 1


def test_keys_that_do_not_exist_count_for_nobody():
    one, other = fleet(2, max_key_tokens_per_minute=600)
    one.serve("nobody", tokens=10**9)
    tell([one, other])

    assert "nobody" not in other.admission._accounts


def test_limits_of_ones_own_are_not_charged_what_others_serve():
    """A router without peers keeps to its own."""
    one = OneRouter(1, max_key_tokens_per_minute=600)
    other = OneRouter(2, max_key_tokens_per_minute=600, has_other_routers=False)
    met(one, other)
    one.serve("a", tokens=10_000)
    tell([one, other])

    assert other.serve("a", now=0.0)


def test_a_request_that_came_before_the_limits_gives_nothing_back():
    """Its estimate was never told, so the others are told of all it has cost."""
    one = OneRouter(1)
    early = one.admission.arrive("a", 0, 500 * BYTES_PER_TOKEN, now=0.0)
    one.admission.change(Settings(max_key_tokens_per_minute=600), now=0.0)
    one.admission.leave(early, 30, now=0.0)

    assert one.admission.usage["a"].tokens == 30
