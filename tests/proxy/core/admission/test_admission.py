"""Who is served, who waits, who is refused."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.limits import Limit, Refusal
from pdrelay_proxy.core.admission.ticket import TRANSITIONS, Ticket, TicketEvent, TicketState
from pdrelay_proxy.settings import Settings

ONE = Settings(max_concurrency=1, max_queue=2, max_queue_wait_s=10.0)


def arrive(admission, key="a", priority=0, size=1, now=0.0):
    return admission.arrive(key, priority, size, now=now)


def states(*tickets):
    return [ticket.state.value for ticket in tickets]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TicketState, TicketEvent)))
def test_the_whole_table(state, event):
    """What is not in it raises, and what is final stays so."""
    ticket = Ticket("a", 0, 1, 0.0, state)
    if event in TRANSITIONS[state]:
        ticket.on(event)
        assert ticket.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(KeyError):
            ticket.on(event)


def test_which_states_are_final():
    """Each of the others has a way out."""
    assert {state for state in TicketState if not TRANSITIONS[state]} == {
        TicketState.REFUSED,
        TicketState.EXPIRED,
        TicketState.LEFT,
    }


@pytest.mark.parametrize("name", ["max_rate", "max_key_rate", "max_key_tokens_per_minute"])
def test_rates_hold_for_all_routers_together_that_know_each_other(name):
    """They share what they let in; without a rate there is nothing to share."""
    limits = Settings(**{name: 7})

    assert Admission(limits, has_other_routers=True).shares_limits
    assert not Admission(limits).shares_limits
    assert not Admission(Settings(), has_other_routers=True).shares_limits


def test_the_more_important_takes_no_place_that_is_anothers_share():
    """Or one client could send all others away."""
    admission = Admission(Settings(max_concurrency=1, max_queue=4, max_queue_wait_s=10.0))
    arrive(admission, "b")
    alice = [arrive(admission, "a") for _ in range(4)]
    mallory = [arrive(admission, "m", priority=-9) for _ in range(3)]

    assert states(*alice) == ["waiting", "waiting", "refused", "refused"]
    assert states(*mallory) == ["waiting", "waiting", "refused"]
    assert arrive(admission, "a", priority=-1).state is TicketState.WAITING  # within a key it may
    assert states(*alice) == ["waiting", "refused", "refused", "refused"]


def test_who_waits_too_long_is_sent_away():
    """At the moment that was said, and not before."""
    admission = Admission(ONE)
    served, waiting = arrive(admission), arrive(admission, now=1.0)
    admission.expire(now=10.9)
    assert admission.poll() == []
    admission.expire(now=11.0)

    assert admission.poll() == [waiting]
    assert states(served, waiting) == ["admitted", "expired"]
    assert waiting.refusal == Refusal(Limit.CONCURRENCY, 5)
    assert admission.refused == {Limit.CONCURRENCY: 1}


def test_the_limits_of_a_key_are_its_own():
    """Over them it is refused at once, and nobody else notices."""
    admission = Admission(
        Settings(max_concurrency=2, max_queue=9, max_queue_wait_s=1, max_key_concurrency=2, max_key_rate=3)
    )
    mine = [arrive(admission, "a") for _ in range(3)]
    assert mine[2].refusal == Refusal(Limit.KEY_CONCURRENCY, 1)
    assert arrive(admission, "b").state is TicketState.WAITING

    for ticket in mine[:2]:
        admission.leave(ticket)
    assert arrive(admission, "a").refusal is None
    assert arrive(admission, "a").refusal == Refusal(Limit.KEY_RATE, 1)
    assert arrive(admission, "a", now=0.34).refusal is None


def test_the_rate_of_all_together():
    """A refusal says when it is worth another try."""
    admission = Admission(Settings(max_rate=0.5))
    arrive(admission)

    assert arrive(admission, "b").refusal == Refusal(Limit.RATE, 2)
    assert arrive(admission, "b", now=2.0).refusal is None


def test_an_array_uses_up_no_more_than_a_second_of_the_rate_of_all():
    """One client with 4,096 prompts would keep all others out for minutes; its own rate counts each prompt."""
    admission = Admission(Settings(max_rate=10, max_key_rate=10))
    admission.arrive("a", 0, 1, 0.0, prompts=4096)

    assert admission.arrive("b", 0, 1, 1.1).refusal is None
    assert admission.arrive("a", 0, 1, 1.1).refusal == Refusal(Limit.KEY_RATE, 408)


def test_what_is_refused_costs_nothing():
    """Neither tokens, nor bytes, nor places."""
    admission = Admission(Settings(max_rate=1, max_key_rate=1, max_inflight_bytes=10))
    assert arrive(admission, size=11).refusal == Refusal(Limit.BYTES, 5)

    assert arrive(admission, size=10).refusal is None


def test_keys_that_are_gone_are_forgotten():
    """As soon as what is known of them says nothing any more."""
    admission = Admission(Settings(max_key_rate=1))
    for number in range(100):
        admission.leave(arrive(admission, f"key-{number}", now=float(number * 2)))

    assert len(admission._accounts) == 1


class AgainstAModel(RuleBasedStateMachine):
    """The model is a list of all that wait, sorted anew each time."""

    @initialize(
        max_concurrency=st.sampled_from([4096, 1, 2]),
        max_queue=st.integers(0, 4),
        max_key_concurrency=st.sampled_from([None, 1, 3]),
        max_inflight_bytes=st.sampled_from([1 << 30, 12]),
    )
    def start(self, **numbers):
        self.limits = Settings(max_queue_wait_s=5.0, **numbers)
        self.admission = Admission(self.limits)
        self.now = 0.0
        self.inside = []
        self.queue = []
        self.tickets = []

    def settle(self, expected):
        """Compare the tickets that changed while they waited."""
        changed = self.admission.poll()
        assert len(set(map(id, changed))) == len(changed)
        assert set(map(id, changed)) == set(map(id, expected))

    def admit_next(self):
        admitted = []
        while self.queue and len(self.inside) < self.limits.max_concurrency:
            self.queue.sort(key=lambda ticket: ticket.priority)  # stable: the order of arrival remains
            self.inside.append(self.queue.pop(0))
            admitted.append(self.inside[-1])
        return admitted

    @rule(key=st.sampled_from("ab"), priority=st.integers(-1, 1), size=st.integers(0, 5))
    def arrive(self, key, priority, size):
        held = [*self.inside, *self.queue]
        limits = self.limits
        full = len(self.inside) >= limits.max_concurrency
        keys = {key, *(ticket.key for ticket in self.queue)}
        counts = {one: sum(ticket.key == one for ticket in self.queue) for one in keys}
        yielding = [one for one in self.queue if one.key == key or counts[one.key] > limits.max_queue / len(keys)]
        worst = max((ticket.priority for ticket in yielding), default=None)
        ticket = self.admission.arrive(key, priority, size, now=self.now)
        self.tickets.append(ticket)
        if limits.max_key_concurrency is not None and sum(one.key == key for one in held) >= limits.max_key_concurrency:
            assert ticket.refusal.limit is Limit.KEY_CONCURRENCY
        elif sum(one.size for one in held) + size > limits.max_inflight_bytes:
            assert ticket.refusal.limit is Limit.BYTES
        elif not full:
            assert ticket.state is TicketState.ADMITTED
            self.inside.append(ticket)
        elif len(self.queue) < limits.max_queue:
            assert ticket.state is TicketState.WAITING
            self.queue.append(ticket)
        elif worst is None or priority >= worst:
            assert ticket.refusal.limit is Limit.QUEUE
        else:
            out = [one for one in yielding if one.priority == worst][-1]
            self.queue.remove(out)
            self.queue.append(ticket)
            assert out.state is TicketState.REFUSED
            self.settle([out])

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def finish(self, data):
        ticket = data.draw(st.sampled_from(self.inside))
        self.inside.remove(ticket)
        self.admission.leave(ticket)
        self.settle(self.admit_next())

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def lose_patience(self, data):
        ticket = data.draw(st.sampled_from(self.queue))
        self.queue.remove(ticket)
        self.admission.leave(ticket)
        self.settle([])

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds):
        self.now += seconds
        late = [ticket for ticket in self.queue if ticket.due <= self.now]
        self.queue = [ticket for ticket in self.queue if ticket.due > self.now]
        self.admission.expire(now=self.now)
        assert {ticket.state for ticket in late} <= {TicketState.EXPIRED}
        self.settle(late)

    @rule(concurrency=st.sampled_from([4096, 1, 2]), queue=st.integers(0, 4))
    def change(self, concurrency, queue):
        self.limits = replace(self.limits, max_concurrency=concurrency, max_queue=queue)
        self.admission.change(self.limits, now=self.now)
        changed = self.admit_next()
        self.queue.sort(key=lambda ticket: ticket.priority)
        while len(self.queue) > queue:
            changed.append(self.queue.pop())
        self.settle(changed)

    @invariant()
    def the_counts_are_right(self):
        if not hasattr(self, "inside"):
            return
        held = [*self.inside, *self.queue]
        assert {ticket.state for ticket in self.inside} <= {TicketState.ADMITTED}
        assert {ticket.state for ticket in self.queue} <= {TicketState.WAITING}
        assert self.admission.admitted == len(self.inside)
        assert self.admission.waiting == len(self.queue) <= self.limits.max_queue
        assert self.admission.held_bytes == sum(ticket.size for ticket in held)
        refused = [ticket for ticket in self.tickets if ticket.state in (TicketState.REFUSED, TicketState.EXPIRED)]
        assert sum(self.admission.refused.values()) == len(refused)
        assert all((ticket.refusal is not None) == (ticket in refused) for ticket in self.tickets)


TestAgainstAModel = AgainstAModel.TestCase
