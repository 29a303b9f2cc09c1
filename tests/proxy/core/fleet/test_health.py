"""The life of an engine: every step of its table, and every order of evidence."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrelay_proxy.core.fleet.failure_window import FailureRatio
from pdrelay_proxy.core.fleet.health import TRANSITIONS, EngineHealth, HealthEvent, HealthState
from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.protocol.fault_table import VERDICTS, Failure, Held
from pdrelay_proxy.settings import Settings
from support.searching import examples

LIMITS = Settings(circuit_breaker_failures=3, health_check_failures=2, ejection_time_s=5)
RATIO = FailureRatio(share=0.5, window_s=10, min_requests=8)
MAX_REST_S = 15
AT_FAULT = tuple(failure for failure, verdict in VERDICTS.items() if verdict.held is Held.AT_ONCE)
IF_SERVED = tuple(failure for failure, verdict in VERDICTS.items() if verdict.held is Held.IF_SERVED_ELSEWHERE)
NOT_AT_FAULT = tuple(failure for failure in Failure if failure not in AT_FAULT)


def life(*, now=0.0):
    return EngineHealth(now, LIMITS, RATIO, MAX_REST_S)


def fail(one, times, *, now=0.0, failure=Failure.TIMEOUT, name="r"):
    for count in range(times):
        one.failed(RequestId(f"{name}{count}"), failure, now=now)


def broken(*, now=0.0):
    one = life()
    fail(one, 3, now=now)
    assert one.state is HealthState.EJECTED
    return one


def try_with(one, request, *, now):
    """Have a broken engine get its trial."""
    assert one.may_serve(now=now)
    one.chosen(now=now)
    one.claimed(request)
    assert one.state is HealthState.HALF_OPEN


def at(state):
    """Bring a life to a state in the ordinary way."""
    one = life()
    match state:
        case HealthState.HEALTHY:
            one.succeeded((RequestId("r"),), now=0)
        case HealthState.EJECTED:
            one = broken()
        case HealthState.HALF_OPEN:
            one = broken()
            assert one.may_serve(now=5)
        case HealthState.DRAINING:
            one.drain(now=0)
        case HealthState.DRAINED:
            one.drain(now=0)
            one.empty("nothing left", now=0)
        case HealthState.GONE:
            one.remove(now=0)
        case _:
            pass
    assert one.state is state
    return one


# What a caller may do at any time, whatever the state.
CALLS = {
    "succeeded": lambda one: one.succeeded((RequestId("r"),), now=9),
    "failed": lambda one: one.failed(RequestId("r"), Failure.TIMEOUT, now=9),
    "failed, perhaps": lambda one: one.failed(RequestId("r"), Failure.BAD_RESPONSE, now=9),
    "blamed": lambda one: one.blamed(Failure.HTTP_5XX, now=9),
    "refused": lambda one: one.failed(RequestId("r"), Failure.REFUSED, now=9),
    "seen": lambda one: one.seen(now=9),
    "missed": lambda one: one.missed("does not answer", now=9),
    "may_serve": lambda one: one.may_serve(now=99),
    "chosen": lambda one: one.chosen(now=9),
    "claimed": lambda one: one.claimed(RequestId("r")),
    "released": lambda one: one.released(RequestId("r")),
}


@pytest.mark.parametrize(("state", "call"), [*itertools.product(HealthState, CALLS)])
def test_news_of_an_engine_can_come_in_any_state(state, call):
    """Legs end late, also those of engines that were drained or removed."""
    one = at(state)
    CALLS[call](one)

    assert (one.state is HealthState.GONE) == (state is HealthState.GONE)


def test_the_table_is_complete_but_for_what_cannot_happen():
    """Only what drains becomes empty, only what broke rests, and those that leave are judged no more."""
    missing = {
        (state, event)
        for state, event in itertools.product(HealthState, HealthEvent)
        if event not in TRANSITIONS[state]
    }
    leaving, judged = (
        {HealthState.DRAINING, HealthState.DRAINED},
        {HealthState.STARTING, HealthState.HEALTHY, HealthState.EJECTED, HealthState.HALF_OPEN},
    )

    assert missing == {
        *itertools.product([HealthState.GONE], HealthEvent),
        *itertools.product(judged, [HealthEvent.EMPTY]),
        *itertools.product(judged - {HealthState.EJECTED}, [HealthEvent.RESTED]),
        *itertools.product(leaving, [HealthEvent.PROVEN, HealthEvent.BACK, HealthEvent.TRIPPED, HealthEvent.RESTED]),
    }


@pytest.mark.parametrize("failure", AT_FAULT)
def test_failures_in_a_row_break_it(failure):
    """So many and no fewer; a success in between starts the count again."""
    one = life()
    fail(one, 2, failure=failure)
    one.succeeded((RequestId("good"),), now=0)
    fail(one, 2, failure=failure)
    assert one.may_serve(now=0)
    fail(one, 1, failure=failure)

    assert (one.state, one.may_serve(now=4.9)) == (HealthState.EJECTED, False)
    assert one.why.startswith("3 requests in a row failed")


@pytest.mark.parametrize("failure", NOT_AT_FAULT)
def test_what_the_engine_is_not_to_blame_for_never_counts(failure):
    """A client that sends nonsense a thousand times must not take an engine away from the others."""
    one = life()
    fail(one, 1000, failure=failure)
    fail(one, 2)

    assert one.state is (HealthState.HEALTHY if VERDICTS[failure].proves_life else HealthState.STARTING)


@pytest.mark.parametrize("failure", IF_SERVED)
def test_failures_of_requests_that_others_serve_break_it_by_their_number(failure):
    """The request was good: so many in a row, and a success in between starts the count again."""
    one = life()
    for _ in range(2):
        one.failed(RequestId("good"), failure, now=0)
        one.blamed(failure, now=1)
    one.succeeded((RequestId("good"),), now=2)
    for _ in range(3):
        assert one.may_serve(now=3)
        one.failed(RequestId("good"), failure, now=3)
        one.blamed(failure, now=3)

    assert one.state is HealthState.EJECTED
    assert one.why.startswith("3 requests in a row failed")
    one.blamed(failure, now=4)
    assert one.since == 3


def test_failures_of_requests_that_others_serve_break_it_by_their_share():
    """Never three in a row."""
    one = life()
    for number in range(4):
        assert one.state in (HealthState.STARTING, HealthState.HEALTHY)
        one.succeeded((RequestId("good"),), now=number)
        one.failed(RequestId("bad"), Failure.HTTP_5XX, now=number)
        one.blamed(Failure.HTTP_5XX, now=number)

    assert one.why == "4 of 8 requests failed: the last one was answered with an error"


@pytest.mark.parametrize("failure", [failure for failure, verdict in VERDICTS.items() if verdict.held != Held.NEVER])
@pytest.mark.parametrize("is_needed", [True, False])
@pytest.mark.parametrize("is_probed", [True, False])
def test_requests_do_not_break_an_engine_that_is_needed_and_answers_its_probes(failure, is_needed, is_probed):
    """The others would have none. One that cannot be reached is away, whoever asks."""
    one = life()
    one.is_needed = lambda: is_needed
    if is_probed:
        one.seen(now=0)
    for number in range(9):
        one.failed(RequestId(f"r{number}"), failure, now=1)
        if VERDICTS[failure].held is Held.IF_SERVED_ELSEWHERE:
            one.blamed(failure, now=1)
    stays = is_needed and is_probed and failure is not Failure.UNREACHABLE

    assert one.may_serve(now=1) is stays
    if stays:
        assert one.why.startswith("answers its probes, but a request")
        one.succeeded((RequestId("good"),), now=2)
        one.seen(now=2)
        assert one.why == "answers probes, and requests again"
        one.missed("cannot be reached", now=3)
        one.failed(RequestId("late"), Failure.TIMEOUT, now=3)
        fail(one, 3, now=3)
        assert one.state is HealthState.EJECTED


@pytest.mark.parametrize("failure", IF_SERVED)
def test_a_trial_with_a_request_that_any_engine_fails_is_not_held_against_it(failure):
    """The next one comes after a rest, unless another engine serves the request: then the break is a longer one."""
    one = broken()
    trial = RequestId("poison")
    try_with(one, trial, now=5)
    one.failed(trial, failure, now=5)
    one.released(trial)
    assert (one.state, one.may_serve(now=9)) == (HealthState.HALF_OPEN, False)
    assert one.may_serve(now=10)

    try_with(one, trial, now=10)
    one.failed(trial, failure, now=10)
    one.released(trial)
    one.blamed(failure, now=11)
    assert (one.state, one.may_serve(now=20)) == (HealthState.EJECTED, False)
    assert one.may_serve(now=21)


def test_a_share_of_failures_breaks_it_too():
    """Every second request fails: never three in a row, and still no engine to send anything to."""
    one = life()
    for number in range(4):
        assert one.state in (HealthState.STARTING, HealthState.HEALTHY)
        one.succeeded((RequestId("good"),), now=number)
        one.failed(RequestId("bad"), Failure.TIMEOUT, now=number)

    assert (one.state, one.why.split(":")[0]) == (HealthState.EJECTED, "4 of 8 requests failed")


def test_failures_of_long_ago_do_not_count():
    """The window slides."""
    one = life()
    for number in range(20):
        one.succeeded((RequestId("good"),), now=number * 6.0)
        one.failed(RequestId("bad"), Failure.TIMEOUT, now=number * 6.0)

    assert one.state is HealthState.HEALTHY


def test_one_trial_at_a_time_and_a_good_one_heals():
    """A broken engine that has rested gets one request; everybody else goes elsewhere until that has succeeded."""
    one = broken()
    trial = RequestId("trial")
    try_with(one, trial, now=5)
    assert not one.may_serve(now=1000)

    one.succeeded((RequestId("one of before"),), now=6)
    assert one.state is HealthState.HALF_OPEN
    one.succeeded((trial,), now=6)
    assert (one.state, one.may_serve(now=6)) == (HealthState.HEALTHY, True)


def test_a_trial_that_fails_makes_the_rest_longer():
    """5, 10, 15 (the most) seconds, and 5 again once it has worked."""
    one = broken()
    now = 0.0
    rests = []
    for number in range(4):
        start = now
        while not one.may_serve(now=now):
            now += 0.5
        rests.append(now - start)
        try_with(one, RequestId(f"trial{number}"), now=now)
        one.failed(RequestId(f"trial{number}"), Failure.TIMEOUT, now=now)
    assert rests == [5, 10, 15, 15]

    now += 15
    try_with(one, RequestId("last"), now=now)
    one.succeeded((RequestId("last"),), now=now)
    fail(one, 3, now=now)
    assert not one.may_serve(now=now + 4.9)
    assert one.may_serve(now=now + 5)


def test_a_trial_that_proves_nothing_is_given_to_the_next_request():
    """Its client hung up, or the other leg failed."""
    one = broken()
    try_with(one, RequestId("left"), now=5)
    one.released(RequestId("left"))
    assert one.may_serve(now=5)

    one.chosen(now=5)  # and never begins
    assert not one.may_serve(now=34)
    assert one.may_serve(now=36)


def test_a_request_that_is_refused_is_a_good_trial():
    """The engine has read it and answered."""
    one = broken()
    try_with(one, RequestId("trial"), now=5)
    one.failed(RequestId("trial"), Failure.REFUSED, now=5)

    assert one.state is HealthState.HEALTHY


def test_probes_break_it_and_bring_it_back():
    """Without any request, and without a rest: it is another process now."""
    one = at(HealthState.HEALTHY)
    one.missed("cannot be reached", now=1)
    assert one.state is HealthState.HEALTHY
    one.missed("cannot be reached", now=2)
    assert (one.state, one.why) == (HealthState.EJECTED, "cannot be reached")
    assert not one.may_serve(now=1000)  # a try with a request would cost a client its time
    one.seen(now=1001)
    assert one.state is HealthState.HEALTHY


def test_an_engine_that_is_not_up_yet_joins_with_its_first_answer():
    """It has never worked, so it is not broken: it gets nothing until it answers, and everything as soon as it does."""
    one = life()
    assert one.may_serve(now=0)
    for now in range(1, 100):
        one.missed("cannot be reached", now=now)
        assert (one.state, one.may_serve(now=now)) == (HealthState.STARTING, False)
    assert one.why == "cannot be reached"
    one.seen(now=100)

    assert (one.state, one.may_serve(now=100)) == (HealthState.HEALTHY, True)


def test_an_engine_is_silent_since_the_first_of_the_probes_it_did_not_answer():
    """An answer of any kind ends it: requests at an engine that answers badly are not those of one that hangs."""
    one = at(HealthState.HEALTHY)
    assert one.silent_s(now=1) == 0
    one.missed("does not answer", now=1)
    one.missed("does not answer", now=3)
    assert one.silent_s(now=7) == 6
    one.missed("answers with status 503", now=8, silent=False)
    assert one.silent_s(now=9) == 0
    one.missed("does not answer", now=10)
    assert one.silent_s(now=12) == 2
    one.seen(now=13)

    assert one.silent_s(now=14) == 0


@pytest.mark.parametrize("answered", [lambda one: one.heard(), lambda one: one.seen(now=3)], ids=["metrics", "probe"])
@pytest.mark.parametrize("state", [HealthState.DRAINING, HealthState.DRAINED])
def test_an_engine_that_is_drained_is_heard_of_too(state, answered):
    """Whatever it is asked then, an answer proves nothing but that it does not hang."""
    one = at(state)
    one.missed("does not answer", now=1)
    assert one.silent_s(now=3) == 2
    answered(one)

    assert (one.state, one.silent_s(now=4)) == (state, 0)


def test_an_engine_in_use_again_is_not_silent_for_what_it_missed_before():
    """It may be another process."""
    one = at(HealthState.DRAINED)
    one.missed("does not answer", now=1)
    one.undrain(now=2)

    assert one.silent_s(now=100) == 0


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Failure.UNREACHABLE, "did not reach it"),
        (Failure.TIMEOUT, "timed out"),
    ],
)
def test_why_it_is_broken_is_a_sentence(failure, said):
    """People read it at night."""
    one = life()
    fail(one, 3, failure=failure)
    assert one.why == f"3 requests in a row failed: the last one {said}"
    try_with(one, RequestId("trial"), now=5)
    one.failed(RequestId("trial"), failure, now=5)

    assert one.why == f"the request it was tried with {said}"


def test_the_cache_of_an_engine_that_was_away_is_another_one():
    """It may have been restarted; what merely fails requests keeps its cache."""
    one = life(now=1.0)
    assert one.cache_since == 1.0
    fail(one, 1, now=2.0, failure=Failure.HTTP_5XX)
    fail(one, 1, now=3.0, failure=Failure.TIMEOUT)
    assert one.cache_since == 1.0
    fail(one, 1, now=4.0, failure=Failure.UNREACHABLE)
    assert one.cache_since == 4.0
    fail(one, 1, now=5.0, failure=Failure.ENGINE_RESTARTED)
    assert one.cache_since == 5.0

    for _ in range(LIMITS.health_check_failures):
        one.missed("why", now=6.0)
    assert (one.state, one.cache_since) == (HealthState.EJECTED, 6.0)
    one.seen(now=9.0)
    assert (one.state, one.cache_since) == (HealthState.HEALTHY, 9.0)


def test_so_is_that_of_an_engine_that_was_away_while_it_was_drained():
    """So engines are replaced."""
    one = at(HealthState.DRAINED)
    before = one.cache_since
    one.missed("why", now=5.0)
    assert one.cache_since == before

    one.missed("why", now=6.0)
    assert (one.state, one.cache_since) == (HealthState.DRAINED, 6.0)


def test_good_probes_do_not_heal_what_requests_broke():
    """/health is fine and every request fails: that engine stays out until a request succeeds."""
    one = broken()
    one.seen(now=1)

    assert one.state is HealthState.EJECTED


def test_an_engine_that_is_drained_gets_nothing_and_may_come_back():
    """Whatever it was before, it joins anew."""
    one = at(HealthState.DRAINED)
    assert not one.may_serve(now=1000)
    one.undrain(now=1)

    assert (one.state, one.may_serve(now=1)) == (HealthState.STARTING, True)


@pytest.mark.parametrize(("interval_s", "serves"), [(5.0, False), (0.0, True)])
def test_an_engine_that_is_away_comes_back_from_a_drain_once_it_answers(interval_s, serves):
    """It may be another one by then, as its first answer tells; without probes nothing else would tell."""
    one = at(HealthState.DRAINED)
    one.settings = replace(one.settings, health_check_interval_s=interval_s)
    one.missed("why", now=1)
    one.undrain(now=2)
    assert (one.state, one.may_serve(now=2)) == (HealthState.STARTING, serves)

    one.seen(now=3)
    assert (one.state, one.may_serve(now=3)) == (HealthState.HEALTHY, True)


class Machine(RuleBasedStateMachine):
    """Any order of requests, probes, orders and time, as the fleet plays them."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.life = EngineHealth(0.0, LIMITS, RATIO, MAX_REST_S)
        self.running = set()
        self.trial = None
        self.count = self.missed = 0

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def send(self):
        if self.life.may_serve(now=self.now):
            request = RequestId(f"r{self.count}")
            self.count += 1
            self.life.chosen(now=self.now)
            self.life.claimed(request)
            self.running.add(request)
            self.trial = request if self.life.state is HealthState.HALF_OPEN else None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(["good", "left", *Failure]))
    def end(self, data, outcome):
        request = data.draw(st.sampled_from(sorted(self.running)))
        if outcome == "good":
            self.life.succeeded((request,), now=self.now)
        elif outcome != "left":
            self.life.failed(request, outcome, now=self.now)
        self.life.released(request)
        self.running.remove(request)

    @rule(good=st.booleans())
    def probe(self, good):
        self.missed = 0 if good else self.missed + 1
        if good:
            self.life.seen(now=self.now)
        else:
            self.life.missed("cannot be reached", now=self.now)

    @rule(order=st.sampled_from(["drain", "undrain"]))
    def order(self, order):
        getattr(self.life, order)(now=self.now)

    @precondition(lambda self: self.life.state is HealthState.DRAINING and not self.running)
    @rule()
    def empty(self):
        self.life.empty("has nothing left", now=self.now)

    @invariant()
    def gets_requests_only_when_it_should(self):
        if self.life.state in (HealthState.DRAINING, HealthState.DRAINED, HealthState.GONE):
            assert not self.life.may_serve(now=self.now)

    @invariant()
    def is_tried_by_one_request_at_a_time(self):
        if self.life.state is not HealthState.HALF_OPEN:
            self.trial = None
        elif self.trial in self.running:
            assert not self.life.may_serve(now=self.now)

    @invariant()
    def always_comes_back_in_the_end(self):
        """Nobody waits for ever for a broken engine without a request on trial, unless its probes fail."""
        if self.life.state is HealthState.EJECTED and self.missed < LIMITS.health_check_failures:
            assert self.life.since + MAX_REST_S >= self.now or self.life.may_serve(now=self.now)


Machine.TestCase.settings = hypothesis_settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
