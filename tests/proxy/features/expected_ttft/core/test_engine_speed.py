"""What is learned of an engine's speed, and what it still has to do."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.features.expected_ttft.core.engine_speed import (
    UNKNOWN,
    EngineSpeed,
    Line,
    LineFit,
    Priors,
    TokenQueue,
)

PRIOR = Line(0.01, 5e-5)
REQUESTS = [RequestId(f"r{number}") for number in range(4)]


def fitted(line, numbers, *, prior=PRIOR, until=0.0):
    fit = LineFit()
    for place, number in enumerate(numbers):
        fit.add(number, line.at(number), prior, until + place * 0.1)
    return fit


@pytest.mark.parametrize("truth", [Line(0.02, 1e-4), Line(0.0, 1e-3), Line(0.5, 1e-5), Line(0.003, 2e-5)])
def test_a_line_is_found_within_a_few_measurements(truth):
    """Of any engine, however unlike the prior."""
    fit = fitted(truth, [100, 900, 400, 2000, 50, 700] * 5)

    for number in (200, 1000, 3000):
        assert fit.among(PRIOR, 3.0).at(number) == pytest.approx(truth.at(number), rel=0.15)


def test_one_outlier_does_not_turn_the_line():
    """An engine that hung once for a minute is as fast as before."""
    truth = Line(0.02, 1e-4)
    fit = fitted(truth, [100, 900, 400, 2000, 50, 700] * 4)
    fit.add(500, 60.0, PRIOR, 3.0)

    assert fit.among(PRIOR, 3.0).at(500) < 1.3 * truth.at(500)


def test_a_very_long_prompt_does_not_outweigh_all_others():
    """Attention makes it dearer for each token, and it is one measurement of many."""
    truth = Line(0.02, 1e-4)
    fit = fitted(truth, [100, 900, 400, 2000, 50, 700] * 4)
    fit.add(100_000, 3 * truth.at(100_000), PRIOR, 3.0)

    assert fit.among(PRIOR, 3.0).at(500) < 1.3 * truth.at(500)


def test_a_lasting_change_is_learned():
    """A GPU that is throttled gets less from then on."""
    fit = fitted(Line(0.02, 1e-4), [100, 900, 400, 2000] * 5)
    slow = Line(0.1, 1e-3)
    for place in range(40):
        number = (100, 900, 400, 2000)[place % 4]
        fit.add(number, slow.at(number), PRIOR, 3.0 + place * 0.1)

    assert fit.among(PRIOR, 7.0).at(1000) > 0.6 * slow.at(1000)


def test_noise_does_not_tell_equal_engines_apart():
    """Or conversations would follow chance from engine to engine. One twice as slow is still told from the others."""
    chance = random.Random(0)

    def believed(scale):
        fit = LineFit()
        for place, number in enumerate((100, 900, 400, 2000, 50, 700) * 6):
            seconds = scale * PRIOR.at(number) * math.exp(chance.gauss(0.0, 1.0) - 0.5)
            fit.add(number, seconds, PRIOR, place * 0.1)
        return fit.line.at(500) / PRIOR.at(500), fit.among(PRIOR, 3.6).at(500) / PRIOR.at(500)

    equal = [believed(1.0) for _ in range(40)]
    slow = [believed(2.0) for _ in range(40)]

    assert statistics.stdev(fair for _, fair in equal) < 0.9 * statistics.stdev(own for own, _ in equal)
    assert statistics.mean(fair for _, fair in slow) > 1.4


def test_what_was_measured_long_ago_counts_less_than_what_is_likely():
    """Or an engine that was slow once would never get a request that could show otherwise."""
    fit = fitted(Line(1.0, 1e-2), [100, 900] * 10)

    assert fit.among(PRIOR, 3.0).at(1000) > 9
    assert fit.among(PRIOR, 1000.0).at(1000) < 0.1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0, 1e3)), max_size=30), st.floats(0, 1e4))
def test_whatever_is_measured_a_time_is_never_negative_and_grows_with_the_number(measured, later):
    """Costs are compared, and added up."""
    fit = LineFit()
    now = 0.0
    for number, seconds, passed in measured:
        now += passed
        fit.add(number, seconds, PRIOR, now)
    line = fit.among(PRIOR, now + later)

    assert line.base_s >= 0
    assert line.slope_s > 0


def test_a_queue_is_worked_off_while_nothing_is_heard():
    """What is under way is partly done, and never quite until the answer is here."""
    queue = TokenQueue()
    queue.enter(REQUESTS[0], 1000, 0.0)

    assert [queue.remaining(0.001, now) for now in (0.0, 0.5, 5.0)] == [1000, 500, pytest.approx(100)]


def test_tokens_count_and_not_requests():
    """A prompt of 100,000 tokens weighs as much as a thousand of a hundred."""
    speed = EngineSpeed()
    speed.send(REQUESTS[0], 100_000, UNKNOWN, 0.0, computes=True)
    speed.send(REQUESTS[1], 100, UNKNOWN, 0.0, computes=True)

    assert speed.computing.tokens == 100_100


def test_legs_in_a_queue_teach_the_pace_of_the_engine_and_not_its_waiting_time():
    """The second one waits for the first, and that is known."""
    speed, first, second = EngineSpeed(), *REQUESTS[:2]
    for now in range(0, 200, 10):
        for request in (first, second):
            speed.send(request, 500, UNKNOWN, now, computes=True)
        for request, seconds in ((first, 0.5), (second, 1.0)):
            speed.answered(request, UNKNOWN, now + seconds)
            speed.leave(request, now + seconds)

    assert speed.prefill.line is not None
    assert [speed.prefill.line.at(tokens) for tokens in (500, 1000)] == pytest.approx([0.5, 1.0], rel=0.1)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "compute", "load", "answered", "leave", "stepped"]),
        st.sampled_from(REQUESTS),
        st.integers(1, 10**6),
        st.floats(0, 10),
    ),
    max_size=60,
)


@given(EVENTS)
def test_when_all_requests_have_left_nothing_is_queued_whatever_became_of_their_legs(events):
    """Sent twice, never answered, answered and never sent: a token that stays would count for ever."""
    speed = EngineSpeed()
    now = 0.0
    priors = Priors(PRIOR, PRIOR, PRIOR)
    for kind, request, tokens, passed in events:
        now += passed
        match kind:
            case "reserve":
                speed.reserve(request)
            case "compute" | "load":
                speed.send(request, tokens, priors, now, computes=kind == "compute")
            case "answered":
                speed.answered(request, priors, now)
            case "leave":
                speed.leave(request, now)
            case _:
                speed.stepped(passed, priors, now)
        assert speed.computing.tokens >= 0
        assert speed.running <= speed.entered
    for request in REQUESTS:
        speed.leave(request, now)

    assert (speed.computing.tokens, speed.loading.tokens, len(speed.computing), len(speed.loading)) == (0, 0, 0, 0)
    assert not speed.entered
    assert not speed.running
