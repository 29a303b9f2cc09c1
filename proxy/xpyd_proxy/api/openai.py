"""The OpenAI routes: a body in, an engine's bytes out."""

from dataclasses import dataclass
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from xpyd_proxy.api.incoming import passed_on, read_body, require_json, until_hung_up
from xpyd_proxy.api.problems import error_body
from xpyd_proxy.api.tracking import journey_of
from xpyd_proxy.core.dialect import parse
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Api, Call
from xpyd_proxy.errors import EngineError
from xpyd_proxy.relay import Relay, Reply
from xpyd_proxy.settings import ClientKvParams, Settings

_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


@dataclass(frozen=True, slots=True)
class Generation:
    """The ASGI application behind /v1/completions and /v1/chat/completions."""

    relay: Relay
    settings: Settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what goes wrong before the first byte is raised, for ``problems`` to answer."""
        require_json(scope)
        body = await read_body(scope, receive, limit=self.settings.max_body_bytes)
        fields = parse(body, strip_private=self.settings.client_kv_params is ClientKvParams.STRIP)
        call = Call(Api(scope["path"]), fields, passed_on(scope))
        journey = journey_of(scope)
        await until_hung_up(receive, self._serve(call, journey, send), answered=lambda: journey.answered)

    async def _serve(self, call: Call, journey: Journey, send: Send) -> None:
        async with self.relay.serve(call, journey) as reply:
            await send(_start(reply))
            await send(_part(reply.body))
            await _send_rest(reply, journey, send)


async def _send_rest(reply: Reply, journey: Journey, send: Send) -> None:
    """Pass a stream on; when it breaks off, say so in the stream, and leave out the [DONE] of a good end."""
    if reply.rest is not None:
        try:
            async for chunk in reply.rest:
                await send(_part(chunk))
        except EngineError as error:
            journey.fault = str(error)
            _, body = error_body(error)
            await send(_part(b"\ndata: " + body + b"\n\n"))  # the empty line closes an event that lacks its own
    journey.answered = True
    await send(_END)


def _start(reply: Reply) -> Message:
    headers = [(b"content-type", reply.content_type.encode("latin-1"))]
    if reply.rest is None:
        headers.append((b"content-length", str(len(reply.body)).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
