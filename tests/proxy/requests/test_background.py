"""Work that no request waits for: it ends with the router."""

import asyncio

from pdrelay_proxy.requests.release import Background


async def test_the_background_has_a_limit_and_places_become_free():
    """Or a router that has lost its engines would collect tasks for ever."""
    background = Background(2)
    go = asyncio.Event()

    async def work():
        await go.wait()

    assert [background.start(work) for _ in range(3)] == [True, True, False]
    go.set()
    await background.drain(5)
    assert background.start(work)
    await background.drain(5)


async def test_draining_waits_and_then_no_longer():
    """A router that is told to end does not hang on an engine that is silent."""
    background = Background(9)
    done = []

    async def soon():
        await asyncio.sleep(0.01)
        done.append("soon")

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            done.append("dropped")

    background.start(soon)
    background.start(never)
    await background.drain(0.05)

    assert done == ["soon", "dropped"]
    assert len(asyncio.all_tasks()) == 1
    await background.drain(0)
