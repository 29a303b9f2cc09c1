"""Who is served, over HTTP, with what vLLM's own publisher says."""

import asyncio
import warnings
from argparse import Namespace
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    from xpyd_connector.shell.kv_events import KVEventsPlugin, _is_closed

from support.kv_events import StreamReader, stored
from xpyd_connector.io.kv_event_source import KVEventSource

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
PATH = "/v1/xpyd/kv_events"
BEHIND_A_KEY = {"api_key": ["k"], "host": None}
OPEN = {"api_key": None, "host": None}


@pytest.fixture
def publisher(tmp_path):
    tmp_path.chmod(0o700)
    where = {"endpoint": f"ipc://{tmp_path}/inproc.ipc", "replay_endpoint": f"ipc://{tmp_path}/inproc-replay.ipc"}
    publisher = ZmqEventPublisher(0, **where)
    yield publisher
    publisher.shutdown()


async def serving(sources, args):
    """Return an app with the plugin's route, and what follows the events."""
    app, plugin = FastAPI(), KVEventsPlugin()
    plugin.attach_router(app)
    await plugin.init_state(SimpleNamespace(get_kv_event_sources=lambda: sources), app.state, Namespace(**args))
    return app, app.state.xpyd_kv_events


async def asked(sources, args):
    app, service = await serving(sources, args)
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


async def test_prompts_are_not_told_to_everybody(publisher):
    """vLLM asks for no key where it has none."""
    status, message = await asked({0: publisher.get_publisher_config()}, OPEN)

    assert (status, message[:26]) == (403, "KV events contain prompts:")


async def test_what_was_published_before_anybody_came_is_replayed(publisher):
    """The plugin may subscribe later than the first step."""
    publisher.publish(KVEventBatch(ts=0.0, events=[stored([b"a", b"b"])]))
    app, service = await serving({0: publisher.get_publisher_config()}, BEHIND_A_KEY)
    reader, messages = StreamReader(), asyncio.Queue()

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
    """ZMQ asks for no key; a directory may be closed."""
    tmp_path.chmod(0o700)
    private, public = f"ipc://{tmp_path}/x", "tcp://*:5557"

    assert KVEventSource(private, "inproc://x").exposures == ()
    assert KVEventSource(private, public).exposures == (public,)
    assert KVEventSource("ipc://@abstract").exposures == ("ipc://@abstract",)
