"""Sessions of ``/v1/realtime`` with vLLM's own server at the other end: its router, its connection, its events.

Only the engine behind it is pretended: no model that transcribes in real time is small enough for a test.
"""

import asyncio
import base64
import json
import socket
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from support.router_process import RouterProcess
from support.sim import until, until_async

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # importing vLLM takes half a minute on a busy machine
AUDIO = base64.b64encode(b"\x01\x00" * 1600).decode()


class Serving:
    """What vLLM's connection asks of its engine."""

    model_cls = SimpleNamespace(realtime_max_tokens=8)

    def __init__(self):
        self.engine_client = self
        self.aborted = []

    def _is_model_supported(self, model):
        return model == "ears"

    def create_error_response(self, message, **_):
        return SimpleNamespace(error=SimpleNamespace(message=message))

    async def transcribe_realtime(self, audio, _tokens):
        async for chunk in audio:
            yield len(chunk)

    async def generate(self, prompt, sampling_params, request_id):
        assert sampling_params.max_tokens == 8
        async for samples in prompt:
            output = SimpleNamespace(text=f"{samples} samples. ", token_ids=[1, 2])
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2, 3])

    async def abort(self, request_id):
        self.aborted.append(request_id)


@contextmanager
def vllm_server(serving):
    """Serve vLLM's route on loopback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = pytest.importorskip("vllm.entrypoints.speech_to_text.realtime.api_router").router  # elsewhere before
    app = FastAPI()
    app.include_router(router)
    app.state.openai_serving_realtime = serving
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="websockets-sansio", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started)
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A router in front of vLLM's server."""
    serving = Serving()
    with vllm_server(serving) as address:
        flags = ("--decode", address, "--realtime", "true", "--health-check-interval", "0")
        router = RouterProcess(tmp_path_factory.mktemp("realtime") / "log", *flags)
        try:
            yield router.started().url.replace("http", "ws"), serving, router
        finally:
            router.kill()


async def said(session, kind):
    """Return the events up to one of a kind."""
    found = []
    while not found or found[-1]["type"] != kind:
        found.append(json.loads(await session.recv()))
    return found


async def test_audio_becomes_text(stage):
    """As vLLM's example client does it (examples/online_serving/openai_realtime_client.py): greeting first."""
    async with connect(f"{stage[0]}/v1/realtime?model=ears", proxy=None) as session:
        assert [event["type"] for event in await said(session, "session.created")] == ["session.created"]
        await session.send(json.dumps({"type": "session.update", "model": "ears"}))
        await session.send(json.dumps({"type": "input_audio_buffer.commit"}))
        for _ in range(3):
            await session.send(json.dumps({"type": "input_audio_buffer.append", "audio": AUDIO}))
        await session.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        *deltas, done = await said(session, "transcription.done")

    assert [event["delta"] for event in deltas] == ["1600 samples. "] * 3
    assert done["text"] == "1600 samples. " * 3
    assert done["usage"]["completion_tokens"] == 6


async def test_vllms_errors_come_through(stage):
    """The session goes on after them."""
    async with connect(f"{stage[0]}/v1/realtime", proxy=None) as session:
        await said(session, "session.created")
        for event, code in (
            ("no JSON", "invalid_json"),
            (json.dumps({"type": "session.update", "model": "eyes"}), "model_not_found"),
            (json.dumps({"type": "input_audio_buffer.commit"}), "model_not_validated"),
            (json.dumps({"type": "kv_transfer_params", "kv_transfer_params": {}}), "unknown_event"),
        ):
            await session.send(event)
            assert (await said(session, "error"))[-1]["code"] == code


async def test_a_client_that_leaves_has_its_transcription_aborted(stage):
    """Or it would go on for nobody."""
    url, serving, _ = stage
    serving.aborted.clear()
    session = await connect(f"{url}/v1/realtime", proxy=None)
    await said(session, "session.created")
    await session.send(json.dumps({"type": "session.update", "model": "ears"}))
    await session.send(json.dumps({"type": "input_audio_buffer.commit"}))
    await session.send(json.dumps({"type": "input_audio_buffer.append", "audio": AUDIO}))
    await said(session, "transcription.delta")
    session.transport.abort()

    await until_async(lambda: serving.aborted)


async def test_binary_messages_end_a_session_in_vllm_alone(stage):
    """vLLM 0.32 reads text only; what it makes of bytes is no fault of the router."""
    async with connect(f"{stage[0]}/v1/realtime", proxy=None) as session:
        await said(session, "session.created")
        await session.send(b"\x00")
        with pytest.raises(ConnectionClosed) as caught:
            await asyncio.wait_for(session.recv(), 10)

    assert caught.value.rcvd.code in (1000, 1011)
    assert "Traceback" not in stage[2].said
