"""An engine does not pay for the time in which the router's own process stood still."""

import asyncio
from contextlib import suppress

import pytest

from pdrelay_proxy.io.fair_timeout import FairTimeout
from support.simulated_loop import advance, in_simulated_time, simulated


async def wait(seconds, *, answers_at=None, stops=()):
    """Wait under a timeout for an answer, while the process is stopped at some times; tell whether it was in time."""
    loop = simulated()
    answer = loop.create_future()
    if answers_at is not None:
        loop.call_at(answers_at, answer.set_result, None)
    for at, stopped_s in stops:
        loop.call_at(at, loop.stand_still, stopped_s)
    with suppress(TimeoutError):
        async with FairTimeout(seconds):
            await answer
    return answer.done() and not answer.cancelled()


@pytest.mark.parametrize(
    ("case", "took_s", "is_answered"),
    [
        ({}, 5, False),
        ({"answers_at": 4.9}, 4.9, True),
        ({"stops": [(1, 3)]}, 5, False),  # the timer is not late
        ({"stops": [(4, 6)]}, 15, False),  # the whole time again
        ({"stops": [(4, 6), (12, 9)]}, 21, False),  # once
        ({"stops": [(4, 6)], "answers_at": 14}, 14, True),
    ],
)
def test_only_what_the_engine_takes_counts(case, took_s, is_answered):
    assert in_simulated_time(wait(5, **case)) == (took_s, is_answered)


def test_a_cancelled_wait_leaves_no_timer():
    async def cancel():
        waiting = asyncio.ensure_future(wait(5))
        await advance(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await advance(60)

    assert in_simulated_time(cancel())[0] == 61
