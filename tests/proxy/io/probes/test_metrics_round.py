"""A round of looks at many engines."""

import asyncio

import pytest

from pdrelay_proxy.io.probes.metrics_round import read_all


async def test_a_look_that_fails_leaves_the_others_theirs():
    """What it raised is raised when all are over."""
    seen = []

    async def look(engine):
        await asyncio.sleep(0)
        if engine == "b":
            raise KeyError(engine)
        await asyncio.sleep(0)
        seen.append(engine)

    with pytest.raises(ExceptionGroup) as raised:
        await read_all(["a", "b", "c"], look, every_s=0.0)

    assert seen == ["a", "c"]
    assert [str(error) for error in raised.value.exceptions] == ["'b'"]


async def test_a_round_is_cancelled_also_when_a_look_fails_at_that_moment():
    """A router that ends waits for its rounds: one that was not cancelled would go on for ever."""
    begun, fails = asyncio.Event(), asyncio.Event()

    async def look(_):
        begun.set()
        await fails.wait()
        raise KeyError

    task = asyncio.ensure_future(read_all(["a"], look, every_s=0.0))
    await begun.wait()
    fails.set()  # the look has the next turn, and the round the one after it
    task.cancel()
    await asyncio.wait((task,))

    assert task.cancelled()
