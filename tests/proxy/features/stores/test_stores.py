"""Every store keeps its promise: what is acknowledged is in every later view, also in those of others."""

import asyncio
import fcntl
import itertools
import json
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import WatchTimes
from pdrelay_proxy.features.stores.configmap import ConfigMapStore
from pdrelay_proxy.features.stores.file import FileStore
from pdrelay_proxy.features.stores.file_text import FileText
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.memory import MemoryStore
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.discovery.store import StoreDown, StoreNotWritten
from support.kube_api import KubeApi, Refusal
from support.redis_server import RedisServer
from support.sim import until_async
from support.small_disk import HOW, WORDS, small_disk
from support.store_ear import Ear

pytestmark = pytest.mark.processes


FAST = WatchTimes(relist_s=30, silence_s=20.0, pause_s=0.02, pause_most_s=0.1)


class FileWorld:
    """Stores in one file."""

    def __init__(self, folder):
        self.path = folder / "set.json"

    async def start(self):
        pass

    async def stop(self):
        pass

    def store(self, ear):
        return FileStore(str(self.path), ear, poll_s=0.02)


class KubeWorld:
    """Stores in one ConfigMap."""

    def __init__(self, _folder):
        self.api = KubeApi()

    async def start(self):
        await self.api.start()
        self.api.put("configmaps", "set", {"metadata": {}})
        self.api.put("configmaps", "other", {"metadata": {}, "data": {"x": "y"}})

    async def stop(self):
        await self.api.stop()

    def store(self, ear):
        client = Kubernetes(Cluster(self.api.url, "default"), timeout_s=20)
        return ConfigMapStore(client, "set", ear, clock=time.monotonic, rhythm=FAST)


class RedisWorld:
    """Stores in one Redis, a real one."""

    def __init__(self, folder):
        self.server = RedisServer(folder)

    async def start(self):
        self.server.start()

    async def stop(self):
        self.server.stop()

    down = stop
    up = start

    def store(self, ear, query=""):
        from pdrelay_proxy.features.stores.redis import RedisStore

        return RedisStore(self.server.url + query, ear, reread_s=0.5)


WORLDS = {"file": FileWorld, "kubernetes": KubeWorld, "redis": RedisWorld}


@asynccontextmanager
async def world(name, folder):
    found = WORLDS[name](folder)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


@asynccontextmanager
async def stores(found, count):
    """So many routers' stores, and what each of them has heard."""
    async with AsyncExitStack() as stack:
        ears = [Ear() for _ in range(count)]
        made = [found.store(ear) for ear in ears]
        for store in made:
            await stack.enter_async_context(store.running())
        await until_async(lambda: all(ear.entries is not None for ear in ears))
        yield list(zip(made, ears, strict=True))


async def agreed(pairs, entries, *, seconds=15.0):
    await until_async(lambda: all(ear.entries == entries for _, ear in pairs), seconds=seconds)


@pytest.mark.parametrize("name", WORLDS)
async def test_nobody_ever_sees_an_acknowledged_entry_vanish(name, tmp_path):
    """An older view that was on its way must not replace a newer one: an engine would leave and come back."""
    async with world(name, tmp_path) as found, stores(found, 2) as pairs:
        (store, ear), (other, _) = pairs
        for turn in range(20):
            await asyncio.gather(store.put(f"a{turn}", ""), other.put(f"b{turn}", ""))
            assert f"a{turn}" in ear.entries
        await store.delete("never there")
        await agreed(pairs, {f"{letter}{turn}": "" for letter in "ab" for turn in range(20)})

    mine = [{key for key in seen if key.startswith("a")} for seen in ear.history]
    assert all(before <= after for before, after in itertools.pairwise(mine))


@pytest.mark.parametrize("name", ["memory", *WORLDS])
async def test_an_entry_is_replaced_only_while_it_is_as_it_was(name, tmp_path):
    """Whoever was late is told so, and knows by then what is there instead."""
    async with AsyncExitStack() as stack:
        if name == "memory":
            ear = Ear()
            pairs = [(MemoryStore(ear), ear)] * 2
        else:
            found = await stack.enter_async_context(world(name, tmp_path))
            pairs = await stack.enter_async_context(stores(found, 2))
        (store, ear), (other, there) = pairs
        await store.put("a", "1")
        assert not await store.replace("a", "0", "2")
        assert not await store.replace("never there", "0", "1")
        assert await store.replace("never there", "0", None)  # it is as it was wanted
        assert await other.replace("a", "1", "2")
        assert there.entries == {"a": "2"}
        assert not await store.replace("a", "1", None)
        assert ear.entries == {"a": "2"}
        assert not await store.replace("a", "1", "3")
        assert await store.replace("a", "2", None)
        assert ear.entries == {}
        await agreed(pairs, {})


async def test_of_routers_that_replace_an_entry_at_once_one_does(tmp_path):
    """In each store that routers share."""
    for name in WORLDS:
        async with world(name, tmp_path) as found, stores(found, 3) as pairs:
            await pairs[0][0].put("a", "1")
            asked = [store.replace("a", "1", text) for (store, _), text in zip(pairs, "xyz", strict=True)]
            done = await asyncio.gather(*asked)
            assert sorted(done) == [False, False, True]
            await agreed(pairs, {"a": "xyz"[done.index(True)]})


async def test_an_entry_that_redis_has_lost_is_replaced_after_it_was_put_back(tmp_path):
    """The router that asks knows it."""
    async with world("redis", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await store.put("a", "1")
        async with Redis.from_url(found.server.url) as client:
            await client.flushall()
        assert await store.replace("a", "1", "2")
        assert ear.entries == {"a": "2"}


async def test_a_replacement_whose_answer_was_lost_is_known_to_be_made(tmp_path):
    """It is tried again, and finds what it wanted."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await until_async(lambda: found.api.watches == 1)
        for before, after in (("1", "2"), ("2", None)):
            await store.put("a", before)
            found.api.faults.lost_answers += 1
            assert await store.replace("a", before, after)
        assert ear.entries == {}


async def test_a_replacement_that_the_api_refuses_for_another_reason_is_not_made(tmp_path):
    """The map may be full, which has the same status as an entry that is another."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await until_async(lambda: found.api.watches == 1)
        await store.put("a", "1")
        for code in (403, 422):
            found.api.faults.refusals.append(Refusal(code, "Never"))
            with pytest.raises(StoreNotWritten, match=f"status {code}"):
                await store.replace("a", "1", "2")
        assert ear.entries == {"a": "1"}


async def test_two_releases_in_one_redis_have_engines_of_their_own(tmp_path):
    """A Redis Cluster has no second database, and an engine of one model must not get requests for another."""
    async with world("redis", tmp_path) as found, AsyncExitStack() as stack:
        ears = [Ear() for _ in range(4)]
        queries = ("&prefix=llm/a", "&prefix=llm/a", "&prefix=llm/b", "")
        made = [found.store(ear, query) for ear, query in zip(ears, queries, strict=True)]
        for store in made:
            await stack.enter_async_context(store.running())
        await made[0].put("x", "1")
        await made[2].put("y", "2")
        await made[3].put("z", "3")
        await until_async(lambda: ears[1].entries == {"x": "1"})

        assert [ear.entries for ear in ears] == [{"x": "1"}, {"x": "1"}, {"y": "2"}, {"z": "3"}]


async def test_a_redis_that_comes_back_empty_gets_back_what_the_routers_know(tmp_path):
    """Without persistence a restart would empty the fleet."""
    async with world("redis", tmp_path) as found, stores(found, 2) as pairs:
        await pairs[0][0].put("a", "1")
        await pairs[1][0].put("b", "2")
        await agreed(pairs, {"a": "1", "b": "2"})
        before = [len(ear.history) for _, ear in pairs]
        await found.down()
        await found.up()
        await until_async(lambda: all(len(ear.history) > n for (_, ear), n in zip(pairs, before, strict=True)))
        await agreed(pairs, {"a": "1", "b": "2"})
        for (_, ear), count in zip(pairs, before, strict=True):
            assert all(seen == {"a": "1", "b": "2"} for seen in ear.history[count:])

        async with stores(found, 1) as [(_, late)]:
            assert late.entries == {"a": "1", "b": "2"}


@pytest.mark.parametrize("name", WORLDS)
async def test_an_engine_is_there_when_its_change_is_acknowledged(name, tmp_path):
    """Also while a view is still taken in, in steps: one that overtook the answer, or that has it and was first."""
    registry = Registry()
    entries = Entries(Reconciler(registry, [EngineSource.STORE], time.monotonic))
    async with world(name, tmp_path) as found, stores(found, 1) as [(other, _)]:
        store = found.store(entries)

        async def put(number):
            await store.put(f"e{number}", f'{{"role":"decode","target":"h{number}:80"}}')
            return bool(registry.members_at([Key(Role.DECODE, f"h{number}:80")]))

        async def elsewhere(number):
            await other.put(f"o{number}", f'{{"role":"prefill","target":"h{number}:80"}}')

        async with store.running():
            there = await asyncio.gather(*map(put, range(30)), *map(elsewhere, range(30)))
            await until_async(lambda: len(registry.members()) == 60)

    assert all(there[:30])


async def test_a_file_survives_its_router(tmp_path):
    """A restart keeps what was added by hand; nothing but the file and its lock is left lying about."""
    found = FileWorld(tmp_path)
    async with stores(found, 1) as [(store, _)]:
        await store.put("a", "1")
    async with stores(found, 1) as [(_, ear)]:
        assert ear.entries == {"a": "1"}
    assert json.loads(found.path.read_text()) == {"a": "1"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["set.json", "set.json.lock"]


@pytest.mark.parametrize("how", HOW)
async def test_a_disk_that_takes_nothing_changes_nothing(tmp_path, how, caplog):
    """The change fails in one sentence, all stores keep their view, and the next change is made once there is room."""
    with small_disk(tmp_path) as disk:
        found = FileWorld(disk.path)
        async with stores(found, 2) as [(store, ear), (_, other)]:
            await store.put("a", "1")
            disk.fail(how)
            for change in (store.put("b", "2"), store.delete("a"), store.replace("a", "1", "2" * 5000)):
                with pytest.raises(StoreNotWritten, match=rf"^{found.path} cannot be written: {WORDS[how]}$"):
                    await change
            assert json.loads(found.path.read_text()) == ear.entries == {"a": "1"}
            disk.mend(how)
            assert sorted(one.name for one in disk.path.iterdir()) == ["set.json", "set.json.lock"]
            await store.put("b", "2")
            await until_async(lambda: other.entries == {"a": "1", "b": "2"})
    assert caplog.messages == []


async def test_a_file_that_is_damaged_is_named_and_changes_nothing(tmp_path, caplog):
    """Nor is it overwritten: somebody may want to repair it."""
    found = FileWorld(tmp_path)
    async with stores(found, 1) as [(store, ear)]:
        await store.put("a", "1")
        found.path.write_text('{"a": ')
        await until_async(lambda: "set.json is no JSON object" in caplog.text)
        with pytest.raises(StoreNotWritten, match=r"set\.json"):
            await store.put("b", "2")
        assert ear.entries == {"a": "1"}
        assert found.path.read_text() == '{"a": '
        found.path.write_text('{"c": "3"}')
        await until_async(lambda: ear.entries == {"c": "3"})


GOOD = '{"role":"decode","target":"http://10.0.0.7:8000"}'
BAD = {
    "not UTF-8": b"\xff\xfe",
    "an engine but for one byte": b'{"role":"decode","target":"http://10.0.0.\xff:8000"}',
    "not JSON": b"decode 10.0.0.7",
    "empty": b"",
    "too long": b"x" * 1_000_000,
    "lines": b'{"role":"decode","target":"a\\nb\\u2028c"}',
}


async def ears_of_a_view(entries):
    """Have a view taken in by a router's own reader; return the addresses of its engines."""
    registry = Registry()
    reconciler = Reconciler(registry, (EngineSource.STORE,), clock=lambda: 0.0)
    await Entries(reconciler).receive(entries)
    return sorted(member.instance.address.authority for member in registry.members())


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_value_in_redis_is_left_out_in_one_sentence(tmp_path, caplog, bad):
    """One value stopped the view of all routers, with a traceback three times a second. A change goes on beside it."""
    async with world("redis", tmp_path) as found, Redis.from_url(found.server.url) as raw:
        async with stores(found, 2) as pairs:
            (store, ear), (_, other) = pairs
            await store.put("a", GOOD)
            await raw.hset("{pdrelay}:instances", "odd", BAD[bad])
            await raw.hset("{pdrelay}:instances", b"n\xff\nme", GOOD)
            await store.put("b", GOOD.replace("7", "8"))
            await until_async(lambda: len(other.entries) == len(ear.entries) == 4)
            assert len(ear.entries["odd"]) < 70_000
            assert await ears_of_a_view(ear.entries) == ["10.0.0.7:8000", "10.0.0.8:8000"]
        kept = await raw.hgetall("{pdrelay}:instances")

    assert (kept[b"odd"], kept[b"n\xff\nme"]) == (BAD[bad], GOOD.encode())
    assert "Traceback" not in caplog.text
    said = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert [line for line in said if line.startswith("left out: entry odd: ")] == said[:1]
    assert all(line.isprintable() and len(line) < 500 for line in said)


async def test_what_redis_has_lost_comes_back_as_it_was(tmp_path):
    """Also bytes that no router can read: they are another program's."""
    async with world("redis", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        async with Redis.from_url(found.server.url) as raw:
            await raw.hset("{pdrelay}:instances", "odd", b"\xff")
        await store.put("a", GOOD)
        before = len(ear.history)
        await found.down()
        await found.up()
        await until_async(lambda: len(ear.history) > before)
        async with Redis.from_url(found.server.url) as raw:
            kept = await raw.hgetall("{pdrelay}:instances")

    assert kept == {b"odd": b"\xff", b"a": GOOD.encode()}


async def test_a_version_in_redis_that_is_no_number_is_said(tmp_path, caplog):
    """The last view stays."""
    async with world("redis", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await store.put("a", GOOD)
        async with Redis.from_url(found.server.url) as raw:
            await raw.set("{pdrelay}:version", b"\xff")
            await until_async(lambda: "{pdrelay}:version is no number: remove it" in caplog.text)
            assert ear.entries == {"a": GOOD}
            await raw.set("{pdrelay}:version", 100)
        await store.put("b", GOOD)

    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("value", [b'"\xff"', b"7", b"null", b"[1]"])
async def test_a_bad_value_in_a_file_is_left_out_and_stays_there(tmp_path, caplog, value):
    """The other engines are served, and a change of theirs does not repair what it does not understand."""
    found = FileWorld(tmp_path)
    found.path.write_bytes(b'{"a": %b, "odd": %b}' % (json.dumps(GOOD).encode(), value))
    async with stores(found, 1) as [(store, ear)]:
        await store.put("b", GOOD.replace("7", "8"))
        assert await ears_of_a_view(ear.entries) == ["10.0.0.7:8000", "10.0.0.8:8000"]

    assert value in found.path.read_bytes().replace(b"\n", b"").replace(b" ", b"")
    assert [line for line in caplog.messages if line.startswith("left out: entry odd: ")]


async def test_a_file_with_too_many_entries_can_be_emptied(tmp_path):
    """Somebody has edited it; each removal was refused because there were still too many."""
    path = tmp_path / "set.json"
    path.write_text(json.dumps({str(n): "x" for n in range(MAX_ENGINES + 2)}))
    ear = Ear()
    async with FileStore(str(path), ear).running():
        await FileStore(str(path), ear).delete("0")
        with pytest.raises(StoreDown, match="more than a router takes"):
            await FileStore(str(path), ear).put("new", "x")

    assert len(ear.entries) == MAX_ENGINES + 1


async def test_a_file_system_that_hangs_stops_neither_the_router_nor_an_operator(tmp_path, monkeypatch):
    """A volume of a network file system whose server is away: whoever looks at a file there waits without end."""
    hangs = threading.Event()
    released = threading.Event()
    was_released = []
    stat = Path.stat

    def hanging(path, **options):
        if path == world.path:
            hangs.set()
            was_released.append(released.wait(10))
        return stat(path, **options)

    world = FileWorld(tmp_path)
    ear = Ear()
    store = FileStore(str(world.path), ear, poll_s=0.01, patience_s=0.1)
    async with store.running():
        monkeypatch.setattr(Path, "stat", hanging)
        await until_async(hangs.is_set)
        with pytest.raises(
            StoreDown, match=r"set.json was neither read nor written within 0.1 s: its file system hangs"
        ):
            await store.put("a", "1")
        released.set()
        await until_async(lambda: len(was_released) > 1)

    assert False not in was_released


async def test_a_folder_that_is_not_there_is_said(tmp_path):
    """When the first engine is added."""
    store = FileStore(str(tmp_path / "no" / "set.json"), Ear())
    with pytest.raises(StoreDown, match="No such file"):
        await store.put("a", "1")


async def test_a_patch_is_tried_again_while_that_may_help(tmp_path):
    """409 comes when too many change the map at once, 429 and 5xx pass; 422 (it is full) and 403 do not."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await until_async(lambda: found.api.watches == 1)  # only patches are asked from now on
        found.api.faults.refusals.extend([Refusal(409, "Conflict"), Refusal(429, "Slow"), Refusal(500, "X")])
        await store.put("a", "1")
        assert ear.entries == {"a": "1"}
        for code in (403, 422):
            found.api.faults.refusals.append(Refusal(code, "Never"))
            with pytest.raises(StoreNotWritten, match=f"status {code}"):
                await store.put("b", "2")
        found.api.faults.refusals.extend([Refusal(500, "X"), Refusal(403, "Never")])
        with pytest.raises(StoreDown, match="status 403") as unknown:
            await store.put("b", "2")
        assert type(unknown.value) is StoreDown  # the first try may have been made
        assert {call.name for call in found.api.calls} == {"set"}
        assert {call.verb for call in found.api.calls} == {"list", "watch", "patch"}


async def test_an_event_that_is_older_than_our_own_change_is_not_believed(tmp_path):
    """It was on its way when the change was acknowledged: the engine would leave for a moment."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        held = []
        found.api.faults.events = lambda events: held.extend(events) or []
        await until_async(lambda: found.api.watches == 1)
        await store.put("a", "1")
        await until_async(lambda: len(held) == 1)
        await store.put("b", "2")
        await until_async(lambda: len(held) == 2)
        found.api.faults.events = lambda events: [*held, *events]
        found.api.put("configmaps", "set", {"metadata": {}, "data": {"a": "1", "b": "2", "c": "3"}})
        await until_async(lambda: "c" in ear.entries)

    assert all(before.keys() <= after.keys() for before, after in itertools.pairwise(ear.history))


async def held_put(api, store):
    """Begin a change that is made, and not answered until the event is set that is returned with its task."""
    may_end = asyncio.Event()
    api.faults.held_patches.append(may_end)
    task = asyncio.create_task(store.put("a", "1"))
    await until_async(lambda: not api.faults.held_patches)
    return task, may_end


async def test_an_answer_that_was_overtaken_is_not_believed(tmp_path):
    """Two changes at once, and the answer to the first comes last: it knows nothing of the second."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        found.api.faults.events = lambda events: []
        first, may_end = await held_put(found.api, store)
        await store.put("b", "2")
        may_end.set()
        await first
        assert ear.entries == {"a": "1", "b": "2"}


async def test_an_answer_that_the_watch_has_overtaken_is_not_believed(tmp_path):
    """Another router's change came after it, and has been seen: nothing would ever show it again."""
    async with world("kubernetes", tmp_path) as found, stores(found, 2) as [(store, ear), (other, _)]:
        await other.put("gone", "1")
        await until_async(lambda: "gone" in ear.entries)
        slow, may_end = await held_put(found.api, store)
        await other.delete("gone")
        await until_async(lambda: ear.entries == {"a": "1"})
        may_end.set()
        await slow
        assert ear.entries == {"a": "1"}


class SlowEar(Ear):
    """Takes a view in when it may."""

    def __init__(self):
        super().__init__()
        self.begun, self.may = 0, asyncio.Event()

    async def receive(self, entries):
        self.begun += 1
        await self.may.wait()
        await super().receive(entries)


async def test_an_answer_that_was_overtaken_waits_for_the_view_that_is_taken_in(tmp_path):
    """Whoever made the change looks at once for what it has brought."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(other, _)]:
        ear = SlowEar()
        store = found.store(ear)
        async with store.running():
            await until_async(lambda: ear.begun == 1)
            ear.may.set()
            await until_async(lambda: ear.entries == {})
            ear.may.clear()
            found.api.faults.events = lambda events: [one for one in events if "b" in one[1]["data"]]
            slow, may_end = await held_put(found.api, store)
            await other.put("b", "2")
            await until_async(lambda: ear.begun > 1)
            may_end.set()
            assert await asyncio.wait([slow], timeout=0.5) == (set(), {slow})
            ear.may.set()
            await slow
            assert ear.entries == {"a": "1", "b": "2"}


async def test_an_answer_about_a_configmap_that_is_no_more_is_not_believed(tmp_path):
    """It was deleted and made anew while the answer was on its way."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        slow, may_end = await held_put(found.api, store)
        found.api.delete("configmaps", "set")
        found.api.put("configmaps", "set", {"metadata": {}, "data": {"b": "2"}})
        await until_async(lambda: ear.entries == {"b": "2"})
        may_end.set()
        await slow
        assert ear.entries == {"b": "2"}


async def test_a_configmap_that_is_not_there_is_said_and_one_that_goes_changes_nothing(tmp_path, caplog):
    """The chart makes it; whoever deletes it by mistake does not empty the fleet."""
    async with world("kubernetes", tmp_path) as found, stores(found, 1) as [(store, ear)]:
        await store.put("a", "1")
        found.api.delete("configmaps", "set")
        await until_async(lambda: "there is no ConfigMap set" in caplog.text)
        assert ear.entries == {"a": "1"}
        with pytest.raises(StoreDown, match="404"):
            await store.put("b", "2")


async def test_a_lock_that_another_process_keeps_is_named_and_not_waited_for(tmp_path):
    """A router that is stopped (SIGSTOP) with it made ``pdrelay instances`` of all others wait for ever."""
    path = tmp_path / "set.json"
    ear = Ear()
    store = FileStore(str(path), ear, lock_wait_s=0.05)
    text = FileText(f"{path}.roles", lock_wait_s=0.05)
    await text.read()
    with Path(f"{path}.lock").open("a") as one, Path(f"{path}.roles.lock").open("a") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            StoreNotWritten, match=r"set\.json was not changed: another process has held its lock .*fuser"
        ):
            await asyncio.wait_for(store.put("a", "1"), 5)
        with pytest.raises(StoreDown, match=r"set\.json\.roles was not changed: another process has held its lock"):
            await asyncio.wait_for(text.replace("one"), 5)

    await store.put("a", "1")
    assert ear.entries == {"a": "1"}
    assert await text.replace("one")
