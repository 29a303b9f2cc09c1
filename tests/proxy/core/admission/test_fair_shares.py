"""Who is next while requests wait: the key that was served the fewest tokens."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.fair_shares import BYTES_PER_TOKEN, FairShares
from pdrelay_proxy.core.admission.ticket import TicketState
from pdrelay_proxy.settings import QueueOrder, Settings

MOST = 400  # tokens of a request


def fair(concurrency=1, queue=1000):
    return Admission(Settings(max_concurrency=concurrency, max_queue=queue, queue_order=QueueOrder.FAIR))


def ask(admission, key, *, prompt=0, priority=0, now=0.0):
    return admission.arrive(key, priority, prompt * BYTES_PER_TOKEN, now=now)


class Served:
    """An admission whose places are all taken by requests of known cost, which end one after the other."""

    def __init__(self, concurrency, seed=1):
        self.admission, self.dice = fair(concurrency), random.Random(seed)
        self.tokens = {}
        self.order = []
        self.running = []

    def ask(self, key, tokens):
        ticket = ask(self.admission, key, prompt=self.dice.randint(0, 40))
        if ticket.state is TicketState.ADMITTED:
            self.running.append((ticket, tokens))
        return ticket

    def end_one(self, costs):
        """One that runs is over; ``costs``: of those that wait, by ticket."""
        ticket, tokens = self.running.pop(self.dice.randrange(len(self.running)))
        self.tokens[ticket.key] = self.tokens.get(ticket.key, 0) + tokens
        self.admission.leave(ticket, tokens, now=0.0)
        for admitted in self.admission.poll():
            self.order.append(admitted.key)
            self.running.append((admitted, costs[admitted]))


def test_a_key_that_sends_much_leaves_places_to_one_that_sends_little():
    """In the order of arrival the second key would wait behind all fifty of the first."""
    admission = fair()
    running = ask(admission, "a")
    for _ in range(50):
        ask(admission, "a")
    mine = ask(admission, "b")
    admission.leave(running, 100)

    assert mine.state is TicketState.ADMITTED


def test_without_the_setting_requests_are_served_as_they_come():
    """Whatever their keys were served."""
    admission = Admission(Settings(max_concurrency=1))
    running, first, mine = (admission.arrive(key, 0, 1, now=0.0) for key in "aab")
    admission.leave(running)

    assert (first.state, mine.state) == (TicketState.ADMITTED, TicketState.WAITING)


def test_a_priority_comes_before_a_share():
    """A key that may say that a request is urgent has said so."""
    admission = fair()
    running = ask(admission, "a")
    first, urgent = ask(admission, "b"), ask(admission, "a", priority=-1)
    admission.leave(running, 10_000)

    assert (first.state, urgent.state) == (TicketState.WAITING, TicketState.ADMITTED)


def test_the_requests_of_a_key_stay_in_order():
    """Also when some of them leave."""
    admission = fair()
    running, *mine = (ask(admission, "a") for _ in range(4))
    admission.leave(mine.pop(1))
    admission.leave(running, 1)

    assert mine[0].state is TicketState.ADMITTED


@given(
    seed=st.integers(0, 10_000),
    concurrency=st.integers(1, 4),
    keys=st.integers(2, 4),
    steps=st.integers(10, 150),
)
def test_keys_that_always_wait_are_served_alike(seed, concurrency, keys, steps):
    """The bound of the paper: twice what the requests under way of one key can cost, whatever each request costs."""
    served = Served(concurrency, seed)
    costs = {}
    dice = random.Random(seed)
    sizes = [dice.choice((5, 50, MOST)) for _ in range(keys)]  # a key has short requests, or long ones

    def refill():
        for key in range(keys):
            while (
                served.admission._accounts.get(f"k{key}") is None or served.admission._accounts[f"k{key}"].waiting < 2
            ):
                tokens = dice.randint(1, sizes[key])
                ticket = served.ask(f"k{key}", tokens)
                costs[ticket] = tokens

    refill()
    before = None
    for step in range(steps):
        served.end_one(costs)
        refill()
        if step == concurrency:  # the first ones were let in without a queue
            before = dict(served.tokens)
    if before is None:
        return
    grown = [served.tokens.get(f"k{key}", 0) - before.get(f"k{key}", 0) for key in range(keys)]

    assert max(grown) - min(grown) <= 2 * (concurrency + 1) * MOST


@given(seed=st.integers(0, 10_000), concurrency=st.integers(1, 3), keys=st.sampled_from([1, 3, 1000]))
def test_no_request_starves_and_no_place_stays_empty(seed, concurrency, keys):
    """One request waits beside a crowd that never ends, of new keys or known ones; no place is free meanwhile."""
    served = Served(concurrency, seed)
    costs = {}
    dice = random.Random(seed)
    for _ in range(concurrency):
        costs[served.ask("crowd", 10)] = 10
    mine = served.ask("small", MOST)
    costs[mine] = MOST
    for number in range(30):
        for _ in range(3):
            tokens = dice.randint(1, MOST)
            costs[served.ask(f"crowd{number % keys}", tokens)] = tokens
        served.end_one(costs)
        assert served.admission.admitted == concurrency or not served.admission.waiting

    assert mine.state in (TicketState.ADMITTED, TicketState.LEFT)


def test_a_key_saves_nothing_up_while_it_is_away():
    """It is lifted to the least counter of those that wait, and takes its turns from there."""
    served = Served(1)
    costs = {}
    for _ in range(20):
        ticket = served.ask("busy", 100)
        costs[ticket] = 100
    for _ in range(10):
        served.end_one(costs)
    for key in ("late", "late", "late", "late"):
        ticket = served.ask(key, 100)
        costs[ticket] = 100
    served.order.clear()
    for _ in range(6):
        served.end_one(costs)

    assert served.order.count("late") == 3


def test_what_is_remembered_of_keys_that_are_gone_is_dropped():
    """When nobody waits there is nothing to be fair about; else, as soon as others were served as much."""
    admission = fair()
    for number in range(200):
        running = ask(admission, f"one{number}")
        waiting = ask(admission, f"other{number}")
        admission.leave(running, 10)
        admission.leave(waiting, 10)

    assert len(admission._shares) < 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.booleans()), max_size=60))
def test_the_queue_by_key_is_that_by_arrival(steps):
    """Two views of those that wait, which come and go in any order."""
    shares = FairShares()
    waiting = []
    admission = fair()
    running = ask(admission, "z")
    for key, priority, leaves in steps:
        if leaves and waiting:
            admission.leave(waiting.pop(len(waiting) // 2))
        else:
            waiting.append(ask(admission, key, priority=priority))
    order = []
    for _ in range(len(waiting)):
        admission.leave(running, 1)
        (running,) = admission.poll()
        order.append(running)

    assert sorted(map(id, order)) == sorted(map(id, waiting))
    assert [ticket.priority for ticket in order] == sorted(ticket.priority for ticket in waiting)
    assert len(shares) == 0


def test_the_order_can_be_changed_while_requests_wait():
    """By SIGHUP; those that wait keep their places within their key."""
    admission = Admission(Settings(max_concurrency=1))
    running, *waiting = (admission.arrive(key, 0, 0, now=0.0) for key in "aaab")
    admission.change(Settings(max_concurrency=1, queue_order=QueueOrder.FAIR), now=0.0)
    admission.leave(running, 0)
    admission.leave(waiting[0], 100)

    assert waiting[2].state is TicketState.ADMITTED
    admission.change(Settings(max_concurrency=1), now=0.0)
    admission.leave(waiting[2], 1)
    assert waiting[1].state is TicketState.ADMITTED


@pytest.mark.parametrize("was_fair", [False, True])
def test_a_request_that_came_before_the_order_is_charged_when_it_ends(was_fair):
    """All of its cost: a counter that is new has charged it nothing yet."""
    order = QueueOrder.FAIR if was_fair else QueueOrder.ARRIVAL
    admission = Admission(Settings(max_concurrency=2, queue_order=order))
    early = ask(admission, "a", prompt=1000)
    if was_fair:
        admission.change(Settings(max_concurrency=2), now=0.0)
    admission.change(Settings(max_concurrency=2, queue_order=QueueOrder.FAIR), now=0.0)
    ask(admission, "b", prompt=5)
    admission.leave(early, 30, now=0.0)

    assert [admission._shares.served(key) for key in "ab"] == [30, 5]


# ---- tokens a minute


def test_a_key_over_its_tokens_waits_until_they_have_drained():
    """A request is charged what it has cost, and the refusal says when the next one may come."""
    admission = Admission(Settings(max_key_tokens_per_minute=600))
    admission.leave(ask(admission, "a", prompt=100), 1200, now=0.0)

    refused = ask(admission, "a", now=1.0)
    assert (refused.refusal.limit.value, refused.refusal.retry_after_s) == ("max_key_tokens_per_minute", 59)
    assert ask(admission, "b", now=1.0).refusal is None
    assert ask(admission, "a", now=60.1).refusal is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2000)), min_size=20, max_size=60))
def test_in_the_long_run_a_key_gets_its_rate(requests):
    """Whatever it asks for: at most a minute's worth and one request more than its rate."""
    admission = Admission(Settings(max_key_tokens_per_minute=600))
    now = 0.0
    tokens = 0
    quota = 600
    for pause, cost in requests:
        now += pause
        ticket = ask(admission, "a", prompt=10, now=now)
        if ticket.refusal is None:
            admission.leave(ticket, cost, now=now)
            tokens += cost

    assert tokens <= quota + 2000 + now * quota / 60 + 1


@pytest.mark.parametrize("tokens", [None, 30])
def test_a_request_that_was_not_served_costs_no_tokens(tokens):
    """Its client has left the queue."""
    admission = Admission(Settings(max_concurrency=1, max_key_tokens_per_minute=100))
    ask(admission, "z")
    for _ in range(10):
        admission.leave(ask(admission, "a", prompt=90), tokens, now=0.0)

    assert ask(admission, "a").refusal is None


def test_a_request_that_came_before_the_quota_is_charged_when_it_ends():
    """It was charged nothing when it came, so its end gives nothing back."""
    admission = Admission(Settings())
    early = [ask(admission, "a", prompt=5000) for _ in range(2)]
    admission.change(Settings(max_key_tokens_per_minute=100), now=0.0)
    admission.leave(early[0], 60, now=0.0)
    assert ask(admission, "a").refusal is None

    admission.leave(early[1], 60, now=0.0)
    assert ask(admission, "a").refusal is not None


def expired(admission):
    admission.expire(now=10.0)


def displaced(admission):
    ask(admission, "a", priority=-1, now=10.0)


def without_a_queue(admission):
    admission.change(replace(admission.limits, max_queue=0), now=10.0)


@pytest.mark.parametrize("sent_away", [expired, displaced, without_a_queue])
def test_a_request_that_is_sent_away_while_it_waits_costs_no_tokens(sent_away):
    """Neither here nor at the other routers of the fleet."""
    admission = Admission(
        Settings(
            max_concurrency=1,
            max_queue=1,
            max_queue_wait_s=10.0,
            max_key_tokens_per_minute=1000,
        ),
        has_other_routers=True,
    )
    ask(admission, "z")
    waiting = ask(admission, "a", prompt=990)
    sent_away(admission)
    admission.change(Settings(max_key_tokens_per_minute=1000), now=10.0)

    assert waiting.refusal is not None
    assert admission.usage["a"].tokens == 0
    assert [ask(admission, "a", prompt=200, now=10.0).refusal for _ in range(2)] == [None, None]
