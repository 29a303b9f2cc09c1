"""The text that routers share: whoever writes it replaces what it has read, or learns that it has changed."""

import os
import threading

import pytest

from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.stores.file_text import FileText
from pdrelay_proxy.features.stores.lease_text import LeaseText
from pdrelay_proxy.io.discovery.store import StoreDown
from support.kube_api import KubeApi, Refusal
from support.shared_texts import LASTS_S, SHARED_TEXTS
from support.small_disk import HOW, WORDS, small_disk

pytestmark = pytest.mark.processes


@pytest.fixture(params=SHARED_TEXTS)
async def shared(request, tmp_path):
    """Yield what makes another process's view of the same text, and what breaks it."""
    async with SHARED_TEXTS[request.param](tmp_path) as found:
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


async def test_a_file_system_that_hangs_holds_one_thread_and_no_operator(tmp_path):
    """The names of engines are looked up in threads of the same pool."""
    path = tmp_path / "set.json.roles"
    os.mkfifo(path)  # to open it waits for somebody who writes
    text = FileText(str(path), patience_s=0.05)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(StoreDown, match=r"set.json.roles was neither read nor written within 0.05 s"):
            await text.read()
    held = threading.active_count() - before
    with path.open("wb") as file:
        file.write(b"{}")
        path.unlink()

    assert held <= 1
    assert await text.read() == ""


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
