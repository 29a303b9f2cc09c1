"""The routes of what one engine does in one leg: the client's bytes in, the engine's bytes out."""

from dataclasses import dataclass, field
from functools import partial

from starlette.types import Receive, Scope, Send

from xpyd_proxy.api.door import caller_of
from xpyd_proxy.api.examining import Examiner
from xpyd_proxy.api.incoming import passed_on, rank_of, read_body, require_form, require_json, until_hung_up
from xpyd_proxy.api.showing import show
from xpyd_proxy.api.tracking import journey_of
from xpyd_proxy.core.asking import model_of
from xpyd_proxy.core.dialect import parse
from xpyd_proxy.core.endpoints import UNCACHED
from xpyd_proxy.core.form import boundary_of, check_form, content_type
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.keys import Keyring
from xpyd_proxy.core.model import Errand
from xpyd_proxy.core.raw_json import encode
from xpyd_proxy.core.salts import Salts
from xpyd_proxy.core.urgency import limited
from xpyd_proxy.relay import Relay
from xpyd_proxy.relay.gate import Gate, Turn
from xpyd_proxy.settings import ClientKvParams, Settings


@dataclass(frozen=True, slots=True)
class Passing:
    """The ASGI application behind the paths whose bodies are JSON objects."""

    relay: Relay
    settings: Settings
    gate: Gate = field(default_factory=Gate)
    examiner: Examiner = field(default_factory=Examiner)
    keyring: Keyring = field(default_factory=Keyring)
    salts: Salts | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what goes wrong before the first byte is raised, for ``problems`` to answer."""
        require_json(scope)
        strips = self.settings.client_kv_params is ClientKvParams.STRIP
        with self.gate.arriving() as holding:
            body = await read_body(scope, receive, limit=self.settings.max_body_bytes, holding=holding)
            fields = await self.examiner.run(len(body), partial(parse, body, strip_private=strips))
        caller = caller_of(scope)
        headers, asked, priority = limited(passed_on(scope), fields, self.keyring.least_of(caller))
        if self.salts is not None and scope["path"] not in UNCACHED:
            asked = self.salts.salted(asked, caller)
        clean = encode(asked) if strips or asked is not fields else body
        errand = Errand(scope["path"], clean, headers, model=model_of(fields), rank=rank_of(scope))
        await _serve(self, errand, scope, receive, send, priority=priority)


@dataclass(frozen=True, slots=True)
class Form:
    """The ASGI application behind the paths whose bodies are forms, with a file in them."""

    relay: Relay
    settings: Settings
    gate: Gate = field(default_factory=Gate)
    examiner: Examiner = field(default_factory=Examiner)
    keyring: Keyring = field(default_factory=Keyring)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. The form's values are not read: its model plays no part in the choice of engine."""
        boundary = boundary_of(require_form(scope))
        with self.gate.arriving() as holding:
            body = await read_body(scope, receive, limit=self.settings.max_body_bytes, holding=holding)
            await self.examiner.run(len(body), partial(check_form, boundary, body))
        headers, _, priority = limited(passed_on(scope), {}, self.keyring.least_of(caller_of(scope)))
        errand = Errand(scope["path"], body, headers, content_type(boundary), rank=rank_of(scope))
        await _serve(self, errand, scope, receive, send, priority=priority)


async def _serve(
    served_by: Passing | Form, errand: Errand, scope: Scope, receive: Receive, send: Send, *, priority: int
) -> None:
    journey = journey_of(scope)
    turn = served_by.gate.admitted(caller_of(scope), priority, len(errand.body))
    work = _run(served_by.relay, turn, errand, journey, send)
    await until_hung_up(scope, receive, work, answered=lambda: journey.answered)


async def _run(relay: Relay, turn: Turn, errand: Errand, journey: Journey, send: Send) -> None:
    async with turn, relay.run(errand, journey) as reply:
        await show(reply, journey, errand.path, send)
