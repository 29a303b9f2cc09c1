"""Who is served, over HTTP, with what vLLM's own publisher says."""

import asyncio
import logging.handlers
import os
import tempfile
import warnings
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from pdrelay_connector.shell.kv_event_service import ask_for_groups
    from pdrelay_connector.shell.kv_events import KVEventsPlugin, _is_closed

from prometheus_client import generate_latest

from pdrelay_connector.core.kv_events.event_hub import MAX_READERS
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.kv_event_source import KVEventSource
from support.kv_events import StreamReader, batch, decoded, follow_frames, stored

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
PATH = "/v1/pdrelay/kv_events"
BEHIND_A_KEY = {"api_key": ["k"], "host": None}
SPEC = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=48)
OPEN = {"api_key": None, "host": None}


@pytest.fixture
def folder():
    """Return a directory that others may enter: those of pytest are all in a private one."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def publisher(tmp_path):
    tmp_path.chmod(0o700)
    where = {"endpoint": f"ipc://{tmp_path}/inproc.ipc", "replay_endpoint": f"ipc://{tmp_path}/inproc-replay.ipc"}
    publisher = ZmqEventPublisher(0, **where)
    yield publisher
    publisher.shutdown()


async def serving(sources, args, ask=None):
    """Return an app with the plugin's route, and what follows the events."""
    app = FastAPI()
    plugin = KVEventsPlugin()
    plugin.attach_router(app)
    core = SimpleNamespace(call_utility_async=ask)
    client = SimpleNamespace(get_kv_event_sources=lambda: sources, engine_core=core)
    await plugin.init_state(client, app.state, Namespace(**args))
    return app, app.state.pdrelay_kv_events


async def asked(sources, args):
    return await answered(*await serving(sources, args))


async def answered(app, service):
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            answer = await http.get(PATH)
            return answer.status_code, answer.json()["error"]["message"]
    finally:
        await service.stop()


async def test_an_engine_without_events_says_how_to_have_some():
    """Also one whose publisher is another."""
    status, message = await asked({}, BEHIND_A_KEY)

    assert (status, message[:40]) == (404, "This engine publishes no KV events: star")
    assert (await asked({0: KVEventsConfig(publisher="null")}, BEHIND_A_KEY))[0] == 404


async def test_an_engine_whose_vllm_does_not_say_where_its_events_are_says_so():
    """Before 0.31. Its operator may have switched the events on, and would look for the mistake."""
    app = FastAPI()
    plugin = KVEventsPlugin()
    plugin.attach_router(app)
    await plugin.init_state(SimpleNamespace(), app.state, Namespace(**BEHIND_A_KEY))
    status, message = await answered(app, app.state.pdrelay_kv_events)

    assert (status, message) == (404, "vLLM says where its KV events are from 0.31 on, and this engine is older")


async def test_prompts_are_not_told_to_everybody(publisher):
    """vLLM asks for no key where it has none."""
    status, message = await asked({0: publisher.get_publisher_config()}, OPEN)

    assert (status, message[:26]) == (403, "KV events contain prompts:")


async def test_what_was_published_before_anybody_came_is_replayed(publisher):
    """The plugin may subscribe later than the first step."""
    publisher.publish(KVEventBatch(ts=0.0, events=[stored([b"a", b"b"])]))
    app, service = await serving({0: publisher.get_publisher_config()}, BEHIND_A_KEY)
    reader = StreamReader()
    messages = asyncio.Queue()

    async def send(message):
        await messages.put(message)

    async def receive():
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": PATH, "headers": [], "query_string": b"", "app": app}
    request = asyncio.create_task(app(scope, receive, send))
    try:
        async with asyncio.timeout(30):
            while {name for name, _ in reader.names()} != {b"a", b"b"}:
                reader.feed((await messages.get()).get("body", b""))
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await service.stop()

    assert reader.complete == {0}
    assert service.hub.readers == 0


@pytest.mark.parametrize(
    ("args", "closed"),
    [
        (OPEN, False),
        ({"api_key": None, "host": "0.0.0.0"}, False),
        ({"api_key": None, "host": "engine.example"}, False),
        ({"api_key": None, "host": "127.0.0.1"}, True),
        ({"api_key": None, "host": "localhost"}, True),
        ({"api_key": None, "host": None, "uds": "/run/engine"}, True),
        (BEHIND_A_KEY, True),
    ],
)
def test_who_has_no_key_is_served_on_this_machine_only(monkeypatch, args, closed):
    """As vLLM reads its options."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert _is_closed(Namespace(**args)) is closed
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert _is_closed(Namespace(**args))


def test_endpoints_that_others_reach_are_named(tmp_path):
    """ZMQ asks for no key; only a directory can be closed."""
    tmp_path.chmod(0o700)
    private = f"ipc://{tmp_path}/x"
    public = "tcp://*:5557"

    assert KVEventSource(private, "inproc://x").exposures == ()
    assert KVEventSource(private, public).exposures == (public,)


def test_a_directory_is_private_by_its_rights_and_its_owner(folder):
    """Also below it, and not by a link that leads elsewhere; who owns a directory may enter it at any time."""
    closed, opened = folder / "closed", folder / "open"
    closed.mkdir(mode=0o700)
    opened.mkdir()
    opened.chmod(0o750)
    (closed / "below").mkdir(mode=0o755)
    (closed / "link").symlink_to(opened)
    if os.geteuid() == 0:
        (folder / "foreign").mkdir(mode=0o700)
        os.chown(folder / "foreign", 12345, 12345)
    found = KVEventSource(f"ipc://{closed}/x", f"ipc://{closed}/below/x").open_directories
    foreign = [f"{folder}/foreign/x"] if (folder / "foreign").exists() else []
    others = [*foreign, f"{opened}/x", f"{closed}/link/x", f"{folder}/absent/x", "@abstract", "/x"]

    assert found == ()
    assert [each for each in others if not KVEventSource(f"ipc://{each}").open_directories] == []


async def test_an_engine_whose_events_others_may_read_does_not_start(folder):
    """A warning would be read after prompts were."""
    with pytest.raises(SettingsError, match="mode 0700"):
        await serving({0: KVEventsConfig(publisher="zmq", endpoint=f"ipc://{folder}/x")}, BEHIND_A_KEY)


@pytest.mark.skipif(
    not hasattr(EngineCore, "get_kv_cache_group_metadata"), reason="this vLLM does not list its KV cache groups"
)
async def test_the_state_begins_with_the_groups_that_the_engine_has(publisher):
    """EngineCore says them to whom it calls external event consumers."""
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC)]),
            kv_cache_manager=SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=32)])
            ),
        )
    )

    async def ask(method):
        return getattr(EngineCore, method)(engine)

    _, service = await serving({0: publisher.get_publisher_config()}, BEHIND_A_KEY, ask)
    try:
        queue = service.hub.join(lambda: None)
        reader = follow_frames(queue.next_frame())
    finally:
        await service.stop()
    _, announced = decoded(reader.batches[0]).events

    assert (announced.block_hashes, announced.token_ids, announced.medium) == ([], [], "GPU")
    assert (announced.group_idx, announced.kv_cache_spec_kind, announced.block_size) == (0, "sliding_window", 32)
    assert announced.kv_cache_spec_sliding_window == 48


async def test_an_engine_that_tells_no_groups_is_followed_all_the_same():
    """Whatever happens in its core."""

    async def fail(_):
        raise Exception("Call to get_kv_cache_group_metadata method failed")  # as core_client.py has it

    async def other(_):
        return "groups"

    assert [await ask_for_groups(ask) for ask in (None, fail, other)] == [(), (), ()]


@pytest.mark.parametrize("token", [987_654_321, 987_654_321_000, "987654321"], ids=["id", "too large", "text"])
async def test_no_log_has_a_token(publisher, token):
    """Who reads logs may not read prompts, also not of a batch that cannot be understood."""
    handler = logging.handlers.BufferingHandler(10_000)
    logging.getLogger("vllm").addHandler(handler)
    bad = msgspec.msgpack.encode([0.0, [msgspec.to_builtins(stored([b"a"])) | {"token_ids": [token] * 4}], 0])
    _, service = await serving({0: publisher.get_publisher_config()}, BEHIND_A_KEY)
    try:
        service._publish(0, bad)
        service._publish(0, bad[:-4])
        service._forget(0)
    finally:
        await service.stop()
        logging.getLogger("vllm").removeHandler(handler)
    lines = [record.getMessage() for record in handler.buffer]

    assert service.hub.counts.forgotten >= 2
    assert any("batch of another form" in line for line in lines)
    assert [line for line in lines if "987" in line] == []


async def test_what_happens_is_counted_in_the_engine_s_metrics(publisher):
    """Blocks by rank, readers, and what was lost; a scrape has what is true now, and the end of a service ends it."""
    _, service = await serving({0: publisher.get_publisher_config()}, BEHIND_A_KEY)
    try:
        service.hub.publish(0, batch(stored([b"a", b"b"])))
        service.hub.publish(0, b"no batch")
        service.hub.publish(0, batch(stored([b"c"])))
        queues = [service.hub.join(lambda: None) for _ in range(MAX_READERS + 2)]
        for queue in queues[2:MAX_READERS]:
            service.hub.leave(queue)
        unregister_vllm_metrics()  # as vLLM does when it scales
        text = generate_latest().decode()
    finally:
        await service.stop()

    expected = {
        "batches_total": 3, "forgotten_total": 1, "refused_batches_total": 1, "overflows_total": 0,
        "unknown_total": 0, "slow_readers_total": 0, "refused_readers_total": 2, "readers": 2,
        'blocks{engine="0"}': 1,
    }  # fmt: skip
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:pdrelay_kv_events_"))
    assert {name: float(found[f"vllm:pdrelay_kv_events_{name}"]) for name in expected} == expected
    assert "vllm:pdrelay_kv_events_" not in generate_latest().decode()
