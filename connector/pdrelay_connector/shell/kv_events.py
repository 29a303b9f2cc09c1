"""The endpoint plugin of ``GET /v1/pdrelay/kv_events``, the engine's KV events (docs/kv-events.md).

It runs in each API server process, and loads only if ``VLLM_PLUGINS`` names it
(``vllm/plugins/__init__.py``). vLLM's middleware requires the API key, because the path begins with
/v1 (``serve/middleware/authenticate.py``).
"""

import asyncio
import ipaddress
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from vllm.logger import init_logger

from pdrelay_connector.core.kv_events.event_hub import MAX_READERS, KVEventHub
from pdrelay_connector.core.kv_events.reader_queue import SIGN_OF_LIFE, ReaderQueue
from pdrelay_connector.shell.kv_event_service import KVEventService, ask_for_groups

PATH = "/v1/pdrelay/kv_events"
MEDIA_TYPE = "application/x-pdrelay-kv-events"
LIFE_EVERY_S = 1.0  # signs of life; as often a connection looks whether the server ends
STALL_S = 30.0  # a reader that takes nothing for so long is cut off
MAX_CHUNK = 256 << 10  # bytes that are sent together, but for a longer frame
_NO_EVENTS = (
    "This engine publishes no KV events: start it with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
    '"ipc:///run/pdrelay/inproc.ipc", '
    '"replay_endpoint": "ipc:///run/pdrelay/inproc-replay.ipc"}\', in a directory of mode 0700'
)
_NO_SOURCES = "vLLM says where its KV events are from 0.31 on, and this engine is older"
_NO_KEY = (
    "KV events contain prompts: this engine serves them with an API key (--api-key or "
    "VLLM_API_KEY), or where it listens on loopback only (--host 127.0.0.1)"
)
_TOO_MANY = f"{MAX_READERS} connections read this engine's KV events, and there may not be more"

logger = init_logger("vllm.pdrelay")


class KVEventsPlugin:
    """vLLM's ``EndpointPlugin`` (``vllm/plugins/endpoint_plugins/interface.py``)."""

    name = "pdrelay_kv_events"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, serve_kv_events, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Begin to follow the events without waiting for a reader: old ones may be lost later.

        Raises :exc:`~pdrelay_connector.errors.SettingsError`, and the engine does not start, if
        others may reach an ipc:// endpoint.
        """
        sources: Callable[[], Mapping[int, Any]] | None = getattr(
            engine_client, "get_kv_event_sources", None
        )
        call_engine = getattr(
            getattr(engine_client, "engine_core", None), "call_utility_async", None
        )
        groups = await ask_for_groups(call_engine if sources is not None and sources() else None)
        service = KVEventService(sources, is_closed=_is_closed(args), groups=groups)
        service.start()
        state.pdrelay_kv_events = service


async def serve_kv_events(request: Request) -> Response:
    """Stream the engine's KV events; 404: none, 403: no API key is set, 503: too many readers."""
    service: KVEventService = request.app.state.pdrelay_kv_events
    if not service.has_sources:
        return _error(404, "NotFoundError", _NO_SOURCES)
    if not service.has_events:
        return _error(404, "NotFoundError", _NO_EVENTS)
    if not service.is_closed:
        return _error(403, "PermissionDeniedError", _NO_KEY)
    woken = asyncio.Event()
    queue = service.hub.join(woken.set)
    if queue is None:
        return _error(503, "ServiceUnavailableError", _TOO_MANY)
    logger.info("KV events: a reader came; readers=%d", service.hub.readers)
    server = getattr(request.app.state, "server", None)  # uvicorn's; launchers/launcher.py sets it
    return KVEventStream(
        service.hub, queue, woken, lambda: bool(getattr(server, "should_exit", False))
    )


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status
    )


class KVEventStream(Response):
    """A body without end, as long as the reader keeps up and the server serves."""

    media_type = MEDIA_TYPE

    def __init__(
        self, hub: KVEventHub, queue: ReaderQueue, woken: asyncio.Event, ending: Callable[[], bool]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._hub = hub
        self._queue = queue
        self._woken = woken
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until one side ends."""
        hang_up = asyncio.create_task(self._close_after(receive))
        try:
            await _in_time(
                send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            while not self._queue.closed and not self._ending():
                await _in_time(send, self._body(await self._chunk()))
            await _in_time(send, self._body(b"") | {"more_body": False})
        except (TimeoutError, OSError):  # the server closes a connection whose response has no end
            logger.info("KV events: a reader took nothing for %.0f s, or is gone", STALL_S)
        finally:
            self._hub.leave(self._queue)
            self._queue.close()
            hang_up.cancel()

    async def _close_after(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.close()

    async def _chunk(self) -> bytes:
        self._woken.clear()
        if data := self._next_chunk():
            return data
        with suppress(TimeoutError):
            async with asyncio.timeout(LIFE_EVERY_S):
                await self._woken.wait()
        return self._next_chunk() or SIGN_OF_LIFE

    def _next_chunk(self) -> bytes:
        frames: list[bytes] = []
        size = 0
        while size < MAX_CHUNK and (frame := self._queue.next_frame()) is not None:
            frames.append(frame)
            size += len(frame)
        return b"".join(frames)

    @staticmethod
    def _body(data: bytes) -> dict[str, Any]:
        return {"type": "http.response.body", "body": data, "more_body": True}


async def _in_time(send: Send, message: dict[str, Any]) -> None:
    """Send; raises ``TimeoutError`` if the reader does not read.

    Not by ``wait_for``, which in Python 3.11 loses a cancellation if its awaitable has just ended.
    """
    async with asyncio.timeout(STALL_S):
        await send(message)


def _is_closed(args: Namespace) -> bool:
    """Tell whether vLLM requires an API key (``serve/middleware/register.py``), or is local."""
    if any(args.api_key or [os.environ.get("VLLM_API_KEY")]) or getattr(args, "uds", None):
        return True
    try:
        return args.host == "localhost" or ipaddress.ip_address(args.host or "").is_loopback
    except ValueError:
        return False
