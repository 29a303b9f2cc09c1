"""Waiting, but not for ever."""

import asyncio

import pytest

from xpyd_proxy.errors import OutOfTime
from xpyd_proxy.relay.waiting import at_most


def late(seconds):
    return OutOfTime(f"after {seconds:g} s")


async def test_what_takes_too_long_is_told_with_its_limit():
    """In the words of whoever waits."""
    with pytest.raises(OutOfTime, match=r"after 0\.01 s"):
        async with at_most(0.01, late):
            await asyncio.Event().wait()


async def test_without_a_limit_there_is_none():
    """And a block that is done in time is left alone."""
    async with at_most(None, late) as limit:
        assert limit.when() is None
    async with at_most(5, late) as limit:
        assert limit.when() > asyncio.get_running_loop().time()


async def test_another_timeout_inside_is_not_ours():
    """Whoever set it has words for it."""
    for seconds in (None, 5):
        with pytest.raises(TimeoutError):
            async with at_most(seconds, late):
                raise TimeoutError
