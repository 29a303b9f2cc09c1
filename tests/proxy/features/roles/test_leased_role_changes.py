"""The lease of roles: one router changes them, and the others know of it."""

import pytest

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.errors import UnknownInstance
from pdrelay_proxy.features.roles.leased_role_changes import LeasedRoleChanges
from pdrelay_proxy.features.roles.memory_text import MemoryText
from pdrelay_proxy.features.roles.role_lease import LASTS_S
from pdrelay_proxy.io.discovery.store import StoreDown
from support.shared_texts import SHARED_TEXTS

pytestmark = pytest.mark.processes


@pytest.fixture(params=SHARED_TEXTS)
async def shared(request, tmp_path):
    """Yield what makes another process's view of the same text, and what breaks it."""
    async with SHARED_TEXTS[request.param](tmp_path) as found:
        yield found


class Router:
    """One router's side of it, in a world whose clock the test moves."""

    def __init__(self, name, text, times, fails=None):
        self.begun = []
        self._fails = fails
        clock, wall = lambda: times[0] + 7.0, lambda: times[0] + 1e9
        self.changes = LeasedRoleChanges(name, text, self._change, clock=clock, wall=wall)

    async def _change(self, name, role):
        if self._fails is not None:
            raise self._fails
        self.begun.append((name, role))


async def test_of_two_routers_one_turns_engines_and_the_other_knows_of_it(shared):
    """And goes on when the first one is gone, with its turns."""
    another, _ = shared
    times = [100.0]
    one, two = Router("one", another(), times), Router("two", another(), times)
    first = await one.changes.hold()
    second = await two.changes.hold()
    engine = InstanceId("decode-0")

    assert (first.holds, second.holds, second.holder) == (True, False, "one")
    assert await one.changes.begin(engine, Role.PREFILL) == ""
    assert await two.changes.begin(engine, Role.PREFILL) == "another router decides on roles"
    assert (one.begun, two.begun) == ([(engine, Role.PREFILL)], [])
    assert (await two.changes.hold()).changed_at == (107.0,)
    times[0] += LASTS_S
    assert (await two.changes.hold()).holds
    assert await one.changes.begin(engine, Role.DECODE) == "another router decides on roles"
    assert (await two.changes.hold()).changed_at == (107.0,)


async def test_a_turn_that_is_refused_counts_as_one():
    """Else a controller would try the same engine every few seconds."""
    times = [100.0]
    one = Router("one", MemoryText(), times, UnknownInstance("there is no instance 'decode-0'"))

    assert await one.changes.begin(InstanceId("decode-0"), Role.PREFILL) == "there is no instance 'decode-0'"
    assert (await one.changes.hold()).changed_at == (107.0,)


async def test_a_clock_that_is_ahead_does_not_hide_a_turn():
    """Hosts' clocks differ: a turn of the future is one of now."""
    text = MemoryText()
    ahead = [130.0]
    times = [100.0]
    await Router("one", text, ahead).changes.begin(InstanceId("decode-0"), Role.PREFILL)

    assert (await Router("two", text, times).changes.hold()).changed_at == (107.0,)


async def test_while_the_store_is_away_the_reason_is_known():
    """A controller that does nothing must say why."""

    class Away(MemoryText):
        async def read(self):
            raise StoreDown("Redis did not answer: connection refused")

    found = await Router("one", Away(), [0.0]).changes.hold()

    assert (found.holds, found.trouble) == (False, "Redis did not answer: connection refused")
