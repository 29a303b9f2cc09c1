"""A prefill engine that dies or hangs: no long wait, no wrong text. Each test asks decode engines of both policies."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.cluster import wait_until
from support.legs import SLOW_TOKENS, decode, plain, prefill, prompt_of, text_of
from support.victims import (
    BORROWING,
    HELD,
    LATE,
    LEASE,
    LINGERING,
    LOADS,
    LONG,
    TIMEOUT,
    USAGE,
    check,
    lost,
    reading,
    serves_on,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: after the transfer, both modes are the same."""
    return (test, params["mode"]) == ("test_hung_and_killed_after_the_transfer", "push")


@pytest.fixture
def decoders(victims):
    return list(victims.hasty.values())


@contextmanager
def asking(p, decoders, prompts, **options):
    """Prefill a prompt for each decode engine; ``ask`` then sends all of the decode legs at once."""
    params = [prefill(p.spec, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(decoders)) as pool:
        yield lambda: [
            pool.submit(timed, decode, d.spec, prompt, offer, **options)
            for d, prompt, offer in zip(decoders, prompts, params, strict=True)
        ]


def timed(ask, *args, **options):
    start = time.monotonic()
    response = ask(*args, **options)
    return response, time.monotonic() - start


def check_all(decoders, prompts, responses, reference, number):
    for d, prompt, response in zip(decoders, prompts, responses, strict=True):
        check(d.policy, response, plain(reference, prompt))
        serves_on(d, reference, number)


def met(p, decoders, reference, number):
    """Each decode engine loads something from P."""
    for i, d in enumerate(decoders):
        prompt = prompt_of(number + i)
        assert text_of(decode(d.spec, prompt, prefill(p.spec, prompt))) == plain(reference, prompt)


def test_hung_before_the_transfer(p, decoders, reference):
    """SIGSTOP of P between the legs: D gives up within transfer_timeout; P thaws and serves on.

    That counts until nobody waits: how long an engine that recomputes then takes for 900 tokens is its processor's.
    """
    prompts = [prompt_of(71, 900), prompt_of(72, 900)]
    met(p, decoders, reference, 60)
    with asking(p, decoders, prompts) as ask:
        with p.frozen():
            asked = time.monotonic()
            answers = ask()
            wait_until(lambda: all(d.now(BORROWING) == 1 for d in decoders), seconds=TIMEOUT, what="all wait for P")
            left = asked + TIMEOUT + LATE - time.monotonic()
            wait_until(lambda: not any(d.now(BORROWING) for d in decoders), seconds=left, what="all have given up")
            responses, seconds = zip(*(answer.result() for answer in answers), strict=True)
            check_all(decoders, prompts, responses, reference, 73)
        wait_until(lambda: p.now(HELD) == 0, seconds=LEASE + LATE, what="P frees after it thawed")

    assert max(took for d, took in zip(decoders, seconds, strict=True) if d.policy == "fail") < TIMEOUT + LATE
    met(p, decoders, reference, 75)


def test_hung_until_the_read_was_given_up(p, decoders, reference):
    """P thaws when nobody waits any more: the read ends, and its blocks are free again on an engine that sleeps."""
    prompts = [prompt_of(77, 900), prompt_of(78, 900)]
    with reading(p, decoders, prompts, reference) as answers:
        responses = [answer.result() for answer in answers]
        wait_until(lambda: all(d.now(LINGERING) == 29 for d in decoders), seconds=LONG, what="the blocks are kept")
    try:
        for d in decoders:
            wait_until(lambda d=d: d.now(LINGERING) == 0, seconds=LONG, what="NIXL lets go of the blocks")
            assert d.now(USAGE) == 0
    finally:
        check_all(decoders, prompts, responses, reference, 79)


def test_killed_before_the_transfer(p, decoders, reference):
    """kill -9 of P between the legs, met before or not: the request ends at once, by policy."""
    prompts = [prompt_of(80), prompt_of(81)]
    timeouts = [d.now(lost("timeout")) for d in decoders]
    with asking(p, decoders, prompts) as ask:
        p.kill()
        responses, seconds = zip(*(answer.result() for answer in ask()), strict=True)
    with ThreadPoolExecutor(len(decoders)) as pool:  # how long a prompt takes a decode engine here and now
        alone = [pool.submit(timed, plain, d.spec, prompt_of(83 + n)) for n, d in enumerate(decoders)]
        own = max(answer.result()[1] for answer in alone)

    check_all(decoders, prompts, responses, reference, 82)
    assert max(seconds) < LATE + own  # any time limit of D is longer
    assert [d.now(lost("timeout")) for d in decoders] == timeouts


def test_a_restarted_prefill_engine_is_met_again(p, decoders, reference):
    """Same address, new engine id: decode engines need no restart."""
    before = [d.now(LOADS) for d in decoders]
    met(p, decoders, reference, 97)

    assert [d.now(LOADS) for d in decoders] == [loads + 1 for loads in before]


def test_killed_during_the_transfer(p, decoders, reference):
    """P hangs so that the read is under way, then dies: the request ends when it dies, not at the timeout."""
    prompts = [prompt_of(90, 900), prompt_of(91, 900)]
    timeouts = [d.now(lost("timeout")) for d in decoders]
    with reading(p, decoders, prompts, reference) as answers:
        p.kill()
        responses = [answer.result() for answer in answers]

    assert [d.now(lost("timeout")) for d in decoders] == timeouts
    check_all(decoders, prompts, responses, reference, 92)


def test_hung_and_killed_after_the_transfer(p, decoders, reference):
    """What D has is D's: an answer under way does not notice that P hangs, nor that it dies."""
    tokens = 160  # eight seconds of slow steps
    prompts = [prompt_of(number, 200 + SLOW_TOKENS) for number in (95, 96)]
    with asking(p, decoders, prompts, tokens=tokens) as ask:
        answers = ask()
        wait_until(lambda: p.now(HELD) == 0, seconds=LEASE - 1, what="P was told that all is read")
        p.freeze()
        time.sleep(0.5)
        assert not any(answer.done() for answer in answers)
        p.kill()
        texts = [text_of(answer.result()[0]) for answer in answers]

    assert texts == [plain(reference, prompt, tokens=tokens) for prompt in prompts]
