"""The store of a router that shares none."""

from pdrelay_proxy.io.discovery.memory import MemoryStore
from support.sim import until_async
from support.store_ear import Ear


async def test_the_memory_store_is_there_as_soon_as_it_runs():
    """And says so again and again."""
    ear = Ear()
    store = MemoryStore(ear, heartbeat_s=0.01)
    async with store.running():
        assert ear.entries == {}
        await store.put("a", "1")
        assert ear.entries == {"a": "1"}
        await until_async(lambda: ear.hearings > 2)
    await store.delete("a")
    assert ear.entries == {}
