"""What a request holds open is closed in the reverse order, whatever goes wrong."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from xpyd_proxy.relay.opened import Block, Opened


class Exits:
    """Exits that note their name and what they are told."""

    def __init__(self):
        self.seen = []

    def of(self, name, error=None):
        def leave(kind, value, _trace):
            assert kind is (None if value is None else type(value))
            self.seen.append((name, value))
            if error is not None:
                raise error

        return leave

    def waiting(self, name):
        async def leave(kind, value, trace):
            await asyncio.sleep(0)
            self.of(name)(kind, value, trace)

        return leave


async def test_the_last_one_is_closed_first():
    """Those that wait and those that do not, each once."""
    exits, opened = Exits(), Opened()
    opened.push(exits.of("a"))
    opened.push_async(exits.waiting("b"))
    opened.push(exits.of("c"))
    await opened.close()
    await opened.close()

    assert exits.seen == [("c", None), ("b", None), ("a", None)]


async def test_an_exit_that_fails_does_not_keep_the_others_open():
    """They hear of its error, which is raised at the end."""
    exits, opened, error = Exits(), Opened(), ValueError("b")
    opened.push_async(exits.waiting("a"))
    opened.push(exits.of("b", error))
    opened.push(exits.of("c"))
    with pytest.raises(ValueError, match="b"):
        await opened.close(KeyError("why"))

    assert [(name, type(seen)) for name, seen in exits.seen] == [("c", KeyError), ("b", KeyError), ("a", ValueError)]


async def test_a_cancellation_while_something_closes_closes_the_rest():
    """A client hangs up twice as fast as an engine says goodbye."""
    exits, opened, stuck = Exits(), Opened(), asyncio.Event()

    async def slow(*_):
        stuck.set()
        await asyncio.Event().wait()

    opened.push(exits.of("a"))
    opened.push_async(slow)
    closing = asyncio.create_task(opened.close())
    await stuck.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    assert [name for name, _ in exits.seen] == ["a"]


async def test_what_is_taken_over_is_closed_by_its_new_owner():
    """And by nobody else."""
    exits, one, other = Exits(), Opened(), Opened()
    one.push(exits.of("a"))
    other.push(exits.of("b"))
    one.take(other)
    await other.close()
    assert not exits.seen
    await one.close()

    assert exits.seen == [("b", None), ("a", None)]


@pytest.mark.parametrize("fails", ["work", "body", "nothing"])
async def test_a_block_closes_what_its_work_has_opened(fails):
    """Whether the work fails, or what is done with its result, or nothing."""
    exits = Exits()

    @asynccontextmanager
    async def context():
        yield "entered"

    async def work(opened):
        opened.push(exits.of("a"))
        assert await opened.enter(context()) == "entered"
        if fails == "work":
            raise KeyError("work")
        return 7

    seen = None
    try:
        async with Block(work) as found:
            assert found == 7
            assert not exits.seen
            if fails == "body":
                raise KeyError("body")
    except KeyError as error:
        seen = error

    assert exits.seen == [("a", seen)]
    assert (seen is None) == (fails == "nothing")
