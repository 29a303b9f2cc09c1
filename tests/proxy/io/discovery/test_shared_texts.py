"""The text that routers share: whoever writes it replaces what it has read, or learns that it has changed."""

from contextlib import asynccontextmanager

import pytest

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.errors import UnknownInstance
from pdrelay_proxy.features.roles.leased_role_changes import LeasedRoleChanges
from pdrelay_proxy.features.roles.role_lease import LASTS_S
from pdrelay_proxy.io.discovery.kubernetes import Cluster, Kubernetes
from pdrelay_proxy.io.discovery.shared_texts import FileText, LeaseText, MemoryText
from pdrelay_proxy.io.discovery.stores import StoreDown
from pdrelay_proxy.io.discovery.stores.redis import RedisText
from support.kube_api import KubeApi, Refusal
from support.redis_server import RedisServer
from support.small_disk import HOW, WORDS, small_disk

pytestmark = pytest.mark.processes


@asynccontextmanager
async def file_texts(folder):
    path = folder / "set.json.roles"
    yield lambda: FileText(str(path)), lambda: path.mkdir()


@asynccontextmanager
async def lease_texts(_):
    api, clients = KubeApi(), []
    await api.start()
    api.put("leases", "r-roles", {"metadata": {}})

    def text():
        clients.append(Kubernetes(Cluster(api.url, "default"), timeout_s=20))
        return LeaseText(clients[-1], "r-roles", "pdrelay/roles", lasts_s=LASTS_S)

    try:
        yield text, lambda: api.delete("leases", "r-roles")
    finally:
        for client in clients:
            async with client:
                pass
        await api.stop()


@asynccontextmanager
async def redis_texts(folder):
    server, texts = RedisServer(folder), []
    server.start()

    def text():
        texts.append(RedisText(server.url + "?prefix=a", "roles"))
        return texts[-1]

    try:
        yield text, server.stop
    finally:
        for one in texts:
            await one.aclose()
        server.stop()


@pytest.fixture(params=[file_texts, lease_texts, redis_texts], ids=["file", "kubernetes", "redis"])
async def shared(request, tmp_path):
    """Yield what makes another process's view of the same text, and what breaks it."""
    async with request.param(tmp_path) as found:
        yield found


async def test_a_text_is_replaced_only_as_it_was_read(shared):
    """The one promise that the lease stands on."""
    another, _ = shared
    one, two = another(), another()

    assert (await one.read(), await two.read()) == ("", "")
    assert await one.replace('{"holder":"one"}')
    assert not await two.replace('{"holder":"two"}')
    assert await two.read() == '{"holder":"one"}'
    assert await two.replace('{"holder":"two"}')
    assert not await one.replace('{"holder":"one again"}')
    assert await one.read() == '{"holder":"two"}'
    assert await one.replace('{"holder":"one"}')
    assert await one.replace('{"holder":"one, later"}')  # without another reading


async def test_a_store_that_is_away_says_so(shared):
    """No lease, no turn: the reason is on the status page."""
    another, breaks = shared
    one = another()
    await one.read()
    breaks()

    with pytest.raises(StoreDown):
        await one.read()
    with pytest.raises(StoreDown):
        await one.replace("{}")


@pytest.mark.parametrize("how", HOW)
async def test_a_disk_that_takes_nothing_leaves_the_text_as_it_was(tmp_path, how):
    """Half of a new one takes no room, and the lease is taken once there is some."""
    with small_disk(tmp_path) as disk:
        path = disk.path / "set.json.roles"
        text = FileText(str(path))
        await text.read()
        await text.replace("old")
        disk.fail(how)
        for _ in range(2):
            assert await text.read() == "old"
            with pytest.raises(StoreDown, match=rf"^{path} cannot be written: {WORDS[how]}$"):
                await text.replace("new" * 1000)
        disk.mend(how)
        assert sorted(one.name for one in disk.path.iterdir()) == ["set.json.roles", "set.json.roles.lock"]
        assert await text.replace("new")
        assert await text.read() == "new"


async def test_kubectl_shows_who_holds_the_lease():
    """``kubectl get lease`` reads these fields."""
    api = KubeApi()
    await api.start()
    try:
        api.put("leases", "r", {"metadata": {}})
        async with Kubernetes(Cluster(api.url, "default"), timeout_s=20) as client:
            text = LeaseText(client, "r", "pdrelay/roles", lasts_s=LASTS_S)
            await text.read()
            assert await text.replace('{"holder":"pod-1","number":1}')
        (found,) = [body for (kind, _, _), body in api.objects.items() if kind == "leases"]
    finally:
        await api.stop()

    assert found["spec"]["holderIdentity"] == "pod-1"
    assert found["spec"]["leaseDurationSeconds"] == LASTS_S
    assert found["spec"]["renewTime"].endswith("Z")


async def test_a_router_without_rights_is_told_so():
    """The chart's Role names get and patch of one Lease."""
    api = KubeApi()
    await api.start()
    try:
        async with Kubernetes(Cluster(api.url, "default"), timeout_s=20) as client:
            api.faults.refusals.append(Refusal(403, "Forbidden"))
            with pytest.raises(StoreDown, match=r"the Lease r cannot be read: .*403"):
                await LeaseText(client, "r", "pdrelay/roles", lasts_s=LASTS_S).read()
    finally:
        await api.stop()


class Router:
    """One router's side of it, in a world whose clock the test moves."""

    def __init__(self, name, text, times, fails=None):
        self.begun, self._fails = [], fails
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
    first, second = await one.changes.hold(), await two.changes.hold()
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
    text, ahead, times = MemoryText(), [130.0], [100.0]
    await Router("one", text, ahead).changes.begin(InstanceId("decode-0"), Role.PREFILL)

    assert (await Router("two", text, times).changes.hold()).changed_at == (107.0,)


async def test_while_the_store_is_away_the_reason_is_known():
    """A controller that does nothing must say why."""

    class Away(MemoryText):
        async def read(self):
            raise StoreDown("Redis did not answer: connection refused")

    found = await Router("one", Away(), [0.0]).changes.hold()

    assert (found.holds, found.trouble) == (False, "Redis did not answer: connection refused")
