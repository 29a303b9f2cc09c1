"""A reply as it goes to the client."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from starlette.types import Message, Send

from xpyd_proxy.api.hot import Outlet
from xpyd_proxy.api.problems import error_body
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Api, Push
from xpyd_proxy.errors import EngineError, OutOfTime
from xpyd_proxy.relay import Reply
from xpyd_proxy.relay.streaming import Pouring

_DONE: Final = b"data: [DONE]\n\n"
_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


async def show(reply: Reply, journey: Journey, path: str, send: Send, outlet: Outlet | None = None) -> None:
    """Send all of a reply. A stream that breaks off says so, and leaves out what would be its good end.

    Where the server has an outlet, and the engine's client can pour, the stream goes from one to the other.
    """
    if outlet is not None and reply.rest is not None and reply.body.endswith(_DONE):
        outlet.gather()
    await send(_start(reply))
    await send(_part(reply.body))
    if reply.rest is not None:
        try:
            if outlet is not None and reply.pouring is not None:
                await _pour(reply.pouring, journey, outlet)
            else:
                async for chunk in reply.rest:
                    await send(_part(chunk))
        except (EngineError, OutOfTime) as error:
            journey.fault = str(error)
            await send(_part(last_event(path, error)))
    journey.answered = True
    await send(_END)


async def _pour(pouring: Pouring, journey: Journey, outlet: Outlet) -> None:
    def remembering(piece: bytes) -> None:
        journey.says(piece)
        outlet.pour(piece)

    outlet.follow(pouring)
    try:
        await pouring.into(remembering if journey.push is Push.AT_ONCE else outlet.pour)
    finally:
        outlet.follow(None)


def last_event(path: str, error: Exception) -> bytes:
    """Return the event that tells a client's library that the stream has failed, in the words of its API."""
    _, body = error_body(error)
    return b"\n" + _EVENTS.get(path, _openai_event)(body)  # the empty line closes an event that lacks its own


def _openai_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def _named_event(data: object) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _responses_event(body: bytes) -> bytes:
    said = msgspec.json.decode(body)["error"]
    return _named_event({"type": "error", "code": said["type"], "message": said["message"], "param": None})


def _messages_event(body: bytes) -> bytes:
    said = msgspec.json.decode(body)["error"]
    return _named_event({"type": "error", "error": {"type": said["type"], "message": said["message"]}})


_EVENTS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    Api.RESPONSES: _responses_event,
    Api.MESSAGES: _messages_event,
}


def _start(reply: Reply) -> Message:
    headers = [(b"content-type", reply.content_type.encode("latin-1"))]
    if reply.rest is None:
        headers.append((b"content-length", str(len(reply.body)).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
