"""Following the KV events of engines: what is known ends with the connection, and comes anew with the next."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_stream import FRAME_MOST
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt
from pdrelay_proxy.features.kv_events.event_counts import EventCounts
from pdrelay_proxy.features.kv_events.event_follower import KvEventFollower
from pdrelay_proxy.io.probes.checks import HttpChecks
from pdrelay_tools.simulated.engine import Sim
from support.sim import serving, until_async
from support.simulated_loop import in_simulated_time

pytestmark = pytest.mark.edges


D0, D1 = InstanceId("decode-0"), InstanceId("decode-1")
IDS = list(range(100))
PROMPT = TokenPrompt(IDS)


@asynccontextmanager
async def following(*targets, index=None, transport=None, **pauses):
    registry = Registry()
    counts = EventCounts()
    for target in targets:
        registry.add_target(Role.DECODE, Target.parse(target), now=0.0)
    checks = HttpChecks(timeout_s=5, headers=lambda role: ((b"authorization", b"Bearer key"),), transport=transport)
    pauses = {"pause_s": 0.01, "refused_s": 0.05} | pauses
    index = CacheIndex() if index is None else index
    follower = KvEventFollower(registry, checks, index, counts, lambda: 0.5, **pauses)
    async with follower.running():
        yield follower


def streamed(status, content, *headers):
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))


def has(follower, count, name=D0):
    return lambda: follower.index.cached(name, PROMPT, None) == count


def knows_nothing(follower):
    return lambda: follower.index.cached(D0, PROMPT, None) is None


async def test_what_an_engine_has_is_known_at_once_and_as_it_changes():
    """The state comes first, whoever has sent the prompts before."""
    engine = Sim("decode", cache_blocks=8)
    engine.cache.use(IDS[:64])
    with serving(engine) as at:
        async with following(at) as follower:
            await until_async(has(follower, 64))
            engine.cache.use(IDS)
            await until_async(has(follower, 96))
            engine.cache.use(list(range(500, 580)))  # five of eight blocks: the ends of the old prompt go first
            await until_async(has(follower, 48))
            engine.cache.clear()
            await until_async(has(follower, 0))

            assert engine.cache.has(IDS) == 0
            assert follower.counts.index_blocks[(D0,)] <= 8
        assert follower.index.cached(D0, PROMPT, None) is None
        assert len(follower.index) == 0
        await until_async(lambda: not engine.cache.readers)


async def test_an_engine_that_turns_is_followed_on():
    """Its process is the same, and so is its cache."""
    engine = Sim("both", cache_blocks=8)
    engine.cache.use(IDS[:64])
    with serving(engine) as at:
        async with following(at) as follower:
            await until_async(has(follower, 64))
            follower.registry.departures.change_role(D0, EngineRole.BOTH, now=0.0)
            follower.registry.departures.change_role(D0, EngineRole.PREFILL, now=0.0, at_once=True)
            await asyncio.sleep(0.5)  # two looks at who is there
            assert has(follower, 64)()
            engine.cache.use(IDS)
            await until_async(has(follower, 96))

            assert not follower.counts.disconnects
            assert len(engine.cache.readers) == 1


async def test_ranks_of_one_address_share_a_connection():
    """Each asks for what its rank has: the others say nothing of it."""
    engine = Sim("decode", cache_blocks=8)
    engine.cache.use(IDS[:64])
    with serving(engine) as at:
        async with following(f"{at}#dp=2") as follower:
            await until_async(has(follower, 64))

            assert follower.index.cached(D1, PROMPT, None) is None
            assert len(engine.cache.readers) == 1


async def test_an_engine_that_goes_is_forgotten_at_once_and_followed_again_when_it_is_back():
    """What it has then may be anything."""
    engine = Sim("decode", cache_blocks=8)
    engine.cache.use(IDS)
    with serving(engine) as at:
        async with following(at) as follower:
            await until_async(has(follower, 96))
            engine.cache.readers[0].append(b"\xc1")  # no msgpack
            await until_async(lambda: follower.counts.disconnects[D0, "invalid"] == 1)
            await until_async(has(follower, 96))
            instance = follower.registry.known(Role.DECODE)[0]
            follower.registry.remove(instance.id, now=0.0)
            await until_async(knows_nothing(follower))
            await until_async(lambda: not engine.cache.readers)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_engine_without_events_is_asked_again_much_later(status, caplog):
    """The reason is shown, once."""
    asked = []

    async def answer(request):
        asked.append(request)
        return streamed(status, b'{"error": {"message": "KV events are off"}}')

    async with following("h:1", transport=httpx.MockTransport(answer), refused_s=0.2) as follower:
        await until_async(lambda: len(asked) == 2)
        counts = follower.counts
        await until_async(lambda: counts.connections[D0, "refused"] == 1)

    assert counts.disconnects[D0, "refused"] >= 2
    assert asked[0].url.path == "/v1/pdrelay/kv_events"
    assert asked[0].headers["authorization"] == "Bearer key"
    assert caplog.text.count("KV events are off") == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, b"65 connections"), "busy"),
        ((200, b""), "ended"),
        ((200, bytes(8)), "ended"),
        ((200, b"\xff" * 20), "invalid"),
        ((200, (FRAME_MOST + 1).to_bytes(4, "big")), "invalid"),
        ((200, b"x", ("content-encoding", "gzip")), "unreachable"),
        (httpx.ConnectError("nobody"), "unreachable"),
    ],
    ids=["busy", "empty", "signs of life", "no frames", "long frame", "packed", "nobody"],
)
async def test_what_is_no_stream_of_events_is_tried_again_and_counted(answer, reason):
    """With a pause that grows; nothing is known of that engine meanwhile."""

    async def reply(_):
        if isinstance(answer, Exception):
            raise answer
        return streamed(*answer)

    async with following("h:1", transport=httpx.MockTransport(reply)) as follower:
        await until_async(lambda: follower.counts.disconnects[D0, reason] >= 3)
        assert follower.index.cached(D0, PROMPT, None) is None


@pytest.mark.parametrize(("status", "reason"), [(None, "unreachable"), (503, "busy"), (404, "refused")])
async def test_an_engine_is_asked_again_as_soon_as_it_is_up(status, reason):
    """The router may have started first: the pause between two attempts is half a minute by then, and may be more."""
    engine = Sim("decode", cache_blocks=8)
    engine.cache.use(IDS)
    is_up = False

    async def answer(request):
        if is_up:
            return httpx.Response(200, stream=Frames())
        if status is None:
            raise httpx.ConnectError("nobody")
        return streamed(status, b"not yet")

    class Frames(httpx.AsyncByteStream):
        async def __aiter__(self):
            async for frame in engine.cache.frames():
                yield frame

    async with following("h:1", transport=httpx.MockTransport(answer), pause_s=3600, refused_s=3600) as follower:
        life = follower.registry.member(D0).life
        life.missed("cannot be reached", now=0.0)
        await until_async(lambda: follower.counts.disconnects[D0, reason] == 1)
        is_up = True
        life.seen(now=1.0)
        await until_async(has(follower, 96))

    assert follower.counts.disconnects[D0, reason] == 1


async def test_an_engine_that_ends_its_connection_is_asked_again_after_a_pause():
    """That it has come up was before: it may end each connection at once."""
    asked = []
    ends = asyncio.Event()

    class Frames(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield bytes(8)
            await ends.wait()

    async def answer(request):
        asked.append(request)
        return httpx.Response(200, stream=Frames())

    async with following("h:1", transport=httpx.MockTransport(answer), pause_s=3600) as follower:
        await until_async(lambda: follower.counts.connections[D0, "following"] == 1)
        follower.registry.member(D0).life.seen(now=0.0)
        await until_async(lambda: follower._followed[D0].is_up)
        ends.set()
        await until_async(lambda: follower.counts.disconnects[D0, "ended"] == 1)
        for _ in range(50):
            await asyncio.sleep(0)

    assert len(asked) == 1


@pytest.mark.parametrize(("lasts_s", "least", "most"), [(0.0, 7, 9), (40.0, 8, 9)])
def test_an_engine_that_ends_each_connection_is_asked_less_and_less_often(lasts_s, least, most):
    """A version whose events are others: each time all of its cache was told, read and thrown away, twice a second."""

    async def scene():
        asked = []

        class Frames(httpx.AsyncByteStream):
            async def __aiter__(self):
                for _ in range(int(lasts_s / 5) + 1):
                    yield bytes(4)
                    await asyncio.sleep(5.0 if lasts_s else 0.0)

        async def answer(request):
            asked.append(request)
            return httpx.Response(200, stream=Frames())

        async with following("h:1", transport=httpx.MockTransport(answer), pause_s=0.5):
            await asyncio.sleep(120.0 if lasts_s == 0.0 else 8 * (lasts_s + 5.5))
        return len(asked)

    assert least <= in_simulated_time(scene())[1] <= most


async def test_an_engine_that_falls_silent_is_left():
    """It may hang, with its connection open for ever."""
    engine = Sim("decode", cache_blocks=8)
    with serving(engine) as at:
        async with following(at, silent_s=0.1) as follower:
            await until_async(lambda: follower.counts.disconnects[D0, "silent"] >= 2)


async def test_an_engine_with_too_much_is_left_alone():
    """To follow it would cost, and be of no use."""
    engine = Sim("decode", cache_blocks=8)
    engine.cache.use(IDS)
    with serving(engine) as at:
        async with following(at, index=CacheIndex(engine_most=3), refused_s=60) as follower:
            await until_async(lambda: follower.counts.connections[D0, "over_limit"] == 1)

            assert follower.counts.index_drops[(D0,)] == 1
            assert follower.index.cached(D0, PROMPT, None) is None
            await until_async(lambda: not engine.cache.readers)


async def test_a_large_state_does_not_hold_up_the_event_loop():
    """20,000 blocks come while a request waits for its turn: it gets one again and again."""
    engine = Sim("decode", cache_blocks=20_000)
    engine.cache.use(list(range(320_000)))
    with serving(engine) as at:
        async with following(at) as follower:
            turns = 0
            while len(follower.index) < 20_000:
                turns += 1
                await asyncio.sleep(0)

    assert turns > 60  # of 256 blocks, and of what is read at once
