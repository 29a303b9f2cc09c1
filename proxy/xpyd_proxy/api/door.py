"""Who may come in: while the router does not end, with a key if the operator wants one, and else from no web site."""

import asyncio
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xpyd_proxy.api.problems import error_body, response_to
from xpyd_proxy.api.tracking import BEGUN, note_fault
from xpyd_proxy.core.endpoints import ENDPOINTS
from xpyd_proxy.core.keys import Keyring, shown_key
from xpyd_proxy.core.lifetime import Lifetime, Stage
from xpyd_proxy.core.model import Headers
from xpyd_proxy.core.sites import Sites
from xpyd_proxy.errors import ClosingDown, CrossSite, Misdirected, Unauthorized, UnsupportedMedia

ANYBODY: Final = "-"  # the name of every client, where no keys are wanted
_KEY: Final = "xpyd.caller"
# For probes, for onlookers and for operators, whose routes look at keys themselves. All else needs a client's key.
LOOKS: Final = frozenset({"/", "/metrics", "/status.json"})
_OPEN: Final = LOOKS | {"/health", "/ready", "/status", "/instances"}
_OPEN_BELOW: Final = ("/instances/",)
_RETRY_AFTER_S: Final = 1  # another router is there already, or this one will be again in a moment


def caller_of(scope: Scope) -> str:
    """Return the name of the key that a request came with."""
    name: str = scope.get(_KEY, ANYBODY)
    return name


class Door:
    """ASGI middleware. Connections are not kept any more once the router has been told to end."""

    def __init__(self, app: ASGIApp, *, lifetime: Lifetime, keyring: Keyring, sites: Sites) -> None:
        self._app = app
        self._lifetime = lifetime
        self._keyring = keyring
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_site(scope)
        except (CrossSite, Misdirected, UnsupportedMedia) as error:
            await response_to(error, scope)(scope, receive, _Answer(send, self._lifetime))
            return
        if is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        has_come = BEGUN in scope  # by the short way, where it was let in, and counted without a gap
        with self._lifetime.serving(is_counted=has_come):
            try:
                if not has_come:
                    self._check(scope)
            except (ClosingDown, Unauthorized) as error:
                await response_to(error, scope)(scope, receive, _Answer(send, self._lifetime))
                return
            answer = _Answer(send, self._lifetime)
            try:
                await self._app(scope, receive, answer)
            except asyncio.CancelledError:
                if self._lifetime.stage is not Stage.CLOSED:
                    raise
                # The server cuts off what took too long to finish, and cares for nothing that comes after.
                await answer.cut_off(scope, receive)

    def _check_site(self, scope: Scope) -> None:
        """Refuse what a page of another web site may have sent; such a page sends an undeclared body unasked."""
        headers: Headers = tuple(scope["headers"])
        self._sites.check(scope["method"], headers, has_keys=self._keyring.keys is not None)
        if self._keyring.keys is None and scope["path"] in ENDPOINTS and scope["method"] == "POST":
            shown = dict(headers)
            if not shown.get(b"content-type") and b"x-api-key" not in shown:  # it could not send that one unasked
                raise UnsupportedMedia("the body is not declared: send Content-Type: application/json")

    def _check(self, scope: Scope) -> None:
        if self._lifetime.stage is Stage.CLOSED:
            raise ClosingDown("the router is about to end and takes no new requests", retry_after_s=_RETRY_AFTER_S)
        if self._keyring.keys is None:
            return
        shown = shown_key(tuple(scope["headers"]))
        if shown is None:
            raise Unauthorized("this router wants an API key: send it as Authorization: Bearer")
        owner = self._keyring.keys.owner(shown)
        if owner is None:
            raise Unauthorized("the API key is not one that this router knows")
        scope[_KEY] = owner


@dataclass(slots=True)
class _Answer:
    """Remembers how much of an answer has been sent, for the case that it must be cut off.

    Once the router leaves it has the client open another connection, to another router, for its next request.
    """

    send: Send
    lifetime: Lifetime
    start: Message | None = None
    over: bool = False  # all of it has been sent: what the request still does is tidying up

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            if self.lifetime.stage is not Stage.SERVING:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.over = True
        await self.send(message)

    async def cut_off(self, scope: Scope, receive: Receive) -> None:
        """Say so, as far as it can still be said."""
        error = cut_short()
        if self.over:
            return
        if self.start is None:
            await response_to(error, scope)(scope, receive, self.send)
        elif (b"content-type", b"text/event-stream") in [(k, v.partition(b";")[0]) for k, v in self.start["headers"]]:
            note_fault(scope, error)
            _, body = error_body(error)
            await self.send({"type": "http.response.body", "body": b"\ndata: " + body + b"\n\n", "more_body": False})


def cut_short() -> ClosingDown:
    """Return what a request is told that is still under way when the router ends."""
    return ClosingDown("the router has to end before this request is finished", retry_after_s=_RETRY_AFTER_S)


def is_open(path: str) -> bool:
    """Tell what is there until the end, and for everybody who passes the check of its own route."""
    return path in _OPEN or path.startswith(_OPEN_BELOW)
