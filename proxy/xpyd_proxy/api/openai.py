"""The routes that generate text: a body in, an engine's bytes out."""

from dataclasses import dataclass, field
from functools import partial

from starlette.types import Receive, Scope, Send

from xpyd_proxy.api.door import caller_of
from xpyd_proxy.api.examining import Examiner
from xpyd_proxy.api.express import LEFT
from xpyd_proxy.api.hot import POURING, Outlet
from xpyd_proxy.api.incoming import passed_on, rank_of, read_body, require_json, until_hung_up
from xpyd_proxy.api.showing import show
from xpyd_proxy.api.tracking import journey_of
from xpyd_proxy.core.dialect import check_wanted_now, parse
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.keys import Keyring
from xpyd_proxy.core.model import Api, Call
from xpyd_proxy.core.salts import Salts
from xpyd_proxy.core.urgency import limited
from xpyd_proxy.relay import Relay
from xpyd_proxy.relay.attempt import Left
from xpyd_proxy.relay.gate import Gate, Turn
from xpyd_proxy.settings import ClientKvParams, Settings


@dataclass(frozen=True, slots=True)
class Generation:
    """The ASGI application behind the paths that generate text."""

    relay: Relay
    settings: Settings
    gate: Gate = field(default_factory=Gate)
    examiner: Examiner = field(default_factory=Examiner)
    keyring: Keyring = field(default_factory=Keyring)
    salts: Salts | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what goes wrong before the first byte is raised, for ``problems`` to answer."""
        left = scope.pop(LEFT, None)  # the scope lives as long as the connection has no other request
        if left is not None:
            await self._go_on(left, scope, receive, send)
            return
        require_json(scope)
        strips = self.settings.client_kv_params is ClientKvParams.STRIP
        with self.gate.arriving() as holding:
            body = await read_body(scope, receive, limit=self.settings.max_body_bytes, holding=holding)
            fields = await self.examiner.run(len(body), partial(parse, body, strip_private=strips))
        api = Api(scope["path"])
        check_wanted_now(api, fields)
        caller = caller_of(scope)
        headers, fields, priority = limited(passed_on(scope), fields, self.keyring.least_of(caller))
        if self.salts is not None:
            fields = self.salts.salted(fields, caller)
        call = Call(api, fields, headers, rank_of(scope))
        journey = journey_of(scope)
        turn = self.gate.admitted(caller_of(scope), priority, len(body))
        await until_hung_up(
            scope,
            receive,
            self._serve(turn, call, journey, send, scope.get(POURING)),
            answered=lambda: journey.answered,
        )

    async def _go_on(self, left: Left, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on with a request that has come the short way so far (api/express.py)."""
        journey = journey_of(scope)

        async def work() -> None:
            async with self.gate.held(left.ticket), self.relay.go_on(left.call, left.attempt, left.stop) as reply:
                await show(reply, journey, left.call.path, send, scope.get(POURING))

        await until_hung_up(scope, receive, work(), answered=lambda: journey.answered)

    async def _serve(self, turn: Turn, call: Call, journey: Journey, send: Send, outlet: Outlet | None) -> None:
        async with turn, self.relay.serve(call, journey) as reply:
            await show(reply, journey, call.path, send, outlet)
