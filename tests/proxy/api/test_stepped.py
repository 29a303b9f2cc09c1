"""Long answers in steps: who waits for whom, by a clock that moves with each step."""

import asyncio
import itertools

import pytest

from pdrelay_proxy.api.stepped import finish_in_steps, in_steps


class Steps:
    """Pieces that take a time each."""

    def __init__(self, count, each_s, size):
        self.now = 0.0
        self.done = 0
        self.count = count
        self.each_s = each_s
        self.size = size

    def __iter__(self):
        for _ in range(self.count):
            self.now += self.each_s
            self.done += 1
            yield b"x" * self.size


async def turns_of(steps):
    """Return after how many steps another task had its turn, each time, and what was yielded."""
    seen, pieces = [], []

    async def other():
        while True:
            seen.append(steps.done)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    pieces = [piece async for piece in in_steps(steps, clock=lambda: steps.now)]
    task.cancel()
    return seen, pieces


async def test_others_have_their_turn_after_a_millisecond_or_two():
    """And not after each step: a busy loop's turns are long, and Prometheus waits for ten seconds."""
    seen, pieces = await turns_of(Steps(100, 0.0005, 10))
    between = [b - a for a, b in itertools.pairwise(seen)]

    assert max(between) <= 4
    assert len(seen) <= 40
    assert b"".join(pieces) == b"x" * 1000


async def test_steps_that_are_long_have_a_turn_behind_each():
    """No two of them are done at once."""
    seen, _ = await turns_of(Steps(50, 0.004, 10))

    assert max(b - a for a, b in itertools.pairwise(seen)) == 1


async def test_small_pieces_are_sent_together():
    """Sending costs as much as several steps."""
    _, pieces = await turns_of(Steps(100, 0.0, 2_000))

    assert [len(piece) for piece in pieces] == [66_000, 66_000, 66_000, 2_000]


async def test_a_result_of_many_steps_lets_others_have_their_turn():
    """As a long answer does."""
    steps = Steps(100, 0.0005, 10)
    seen = []

    def work():
        for _ in steps:
            yield
        return steps.done

    async def other():
        while True:
            seen.append(steps.done)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    result = await finish_in_steps(work(), clock=lambda: steps.now)
    task.cancel()

    assert result == 100
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 4


@pytest.mark.parametrize("turn_s", [0.05, 0.1, 0.4])
async def test_on_a_busy_loop_an_answer_takes_a_bounded_multiple_of_its_own_work(turn_s):
    """A scrape of 1,760 engines took 18 seconds: 250 turns, each of which waited for all that others had to do."""
    steps = Steps(1_000, 0.0005, 10)

    async def other():
        while True:
            steps.now += turn_s
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    pieces = [piece async for piece in in_steps(steps, clock=lambda: steps.now)]
    task.cancel()

    assert b"".join(pieces) == b"x" * 10_000
    assert steps.now <= 11 * 0.5 + 2 * turn_s
