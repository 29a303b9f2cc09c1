"""Picks two engines, sends the two legs, and sends them again where that is right."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from xpyd_proxy.core import dialect, push
from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.learned import Learned
from xpyd_proxy.core.model import Call, Instance, Leg, Push, RequestId, Role
from xpyd_proxy.core.ports import Engines, Pairing
from xpyd_proxy.core.push import Coordinates, Handover, Manner
from xpyd_proxy.core.raw_json import encode
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.core.retries import Again, Chances, Failure, LegFailed
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.core.verdict import check_prefill
from xpyd_proxy.errors import EngineError, Moved, Refused
from xpyd_proxy.relay.reply import Reply, begin
from xpyd_proxy.relay.tasks import running


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try: everything it opens is on its stack, and both legs carry its id."""

    call: Call
    journey: Journey
    chances: Chances
    request: RequestId
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    def leg(self, instance: Instance, body: bytes) -> Leg:
        """Both legs carry the same fresh id: engines match their halves of a request by it."""
        headers = (*self.call.headers, (b"x-request-id", self.request.encode()))
        return Leg(instance, self.call.api, body, headers)


@dataclass(frozen=True, slots=True)
class Relay:
    """Serves requests. It is handed everything it uses, and builds nothing."""

    registry: Registry
    engines: Engines
    pairing: Pairing
    learned: Learned
    manner: Manner
    clock: Callable[[], float]  # seconds; only differences count
    prefill_timeout_s: float
    retries: int

    @asynccontextmanager
    async def serve(self, call: Call, journey: Journey) -> AsyncGenerator[Reply]:
        """Enter with the engine's good answer in hand; leaving closes what is still open upstream.

        Raises:
            NoInstance: there is no engine to serve the request.
            Refused: an engine says that the client is at fault.
            EngineError: an engine failed before anything was shown to the client, and so did the other tries.
        """
        journey.solo = solo_reason(call.api, call.fields)
        chances = Chances(self.retries)
        while True:
            attempt = _Attempt(call, journey, chances, journey.attempt_id)
            try:
                async with attempt.opened:
                    yield await self._try(attempt)
                    return
            except LegFailed as failed:  # by now both legs are closed
                self._once_more(attempt, failed)

    async def _try(self, attempt: _Attempt) -> Reply:
        among = attempt.chances.among
        candidates = among(self.registry.usable(Role.DECODE))
        if attempt.journey.solo is not None:
            return await self._decode(attempt, self.pairing.one(candidates), encode(attempt.call.fields))
        prefill, decode = self.pairing.pair(among(self.registry.usable(Role.PREFILL)), candidates)
        told = self.learned.coordinates(prefill.id)
        if told is None:
            return await self._in_turn(attempt, prefill, decode)
        return await self._at_once(attempt, prefill, decode, told)

    async def _in_turn(self, attempt: _Attempt, prefill: Instance, decode: Instance) -> Reply:
        """Tell the decode engine what the prefill engine has answered."""
        handover = await self._prefill(attempt, prefill)
        attempt.journey.push = Push.IN_TURN if handover.coordinates else None
        return await self._decode(attempt, decode, dialect.decode_body(attempt.call.fields, handover.params))

    async def _at_once(self, attempt: _Attempt, prefill: Instance, decode: Instance, told: Coordinates) -> Reply:
        """Send both legs, and drop the one when the other fails. The decode engine may well answer first."""
        attempt.journey.push = Push.AT_ONCE
        params = push.decode_params(told, attempt.call.api, attempt.request)
        body = dialect.decode_body(attempt.call.fields, params)
        start = attempt.opened.enter_async_context
        prefilling = await start(running(self._prefill(attempt, prefill, told)))
        decoding = await start(running(self._decode(attempt, decode, body)))
        await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
        if prefilling.done() and not _is_good(decoding):
            prefilling.result()  # that it failed may be why the other one did
        reply = await decoding
        attempt.opened.callback(_note_late_fault, prefilling, attempt.journey)
        return reply

    async def _prefill(self, attempt: _Attempt, prefill: Instance, told: Coordinates | None = None) -> Handover:
        """Get the prompt computed, and learn where the engine is; ``told``: what the decode engine was told of it."""
        visit = attempt.journey.prefill = Visit(prefill.id)
        call = attempt.call
        body = dialect.prefill_body(call.api, call.fields, push.transfer_of(attempt.request))
        with self._forgetting(prefill), _failing(prefill), self._timed(visit):
            answer = await self.engines.ask(attempt.leg(prefill, body), timeout_s=self.prefill_timeout_s)
            check_prefill(prefill.id, answer)
            handover = push.handover(prefill.id, answer.body, call.api, attempt.request, self.manner)
        self.learned.learn(prefill.id, handover.coordinates)
        if told not in (None, handover.coordinates):
            raise LegFailed(prefill, Moved(f"{prefill.id} is not the engine that the decode engine was told of"))
        return handover

    async def _decode(self, attempt: _Attempt, decode: Instance, body: bytes) -> Reply:
        """Get a good answer from a decode engine, or from another one if this one got nothing of the request."""
        while True:
            try:
                return await self._decode_here(attempt, decode, body)
            except LegFailed as failed:
                known = self.registry.known(Role.DECODE)
                if failed.rule.again is not Again.DECODE or not attempt.chances.take(failed, known):
                    raise
                attempt.journey.set_aside(Role.DECODE, failed.failure)
            decode = self.pairing.one(attempt.chances.among(known))

    async def _decode_here(self, attempt: _Attempt, decode: Instance, body: bytes) -> Reply:
        visit = attempt.journey.decode = Visit(decode.id)
        async with AsyncExitStack() as opening:
            with _failing(decode), self._timed(visit):
                stream = await opening.enter_async_context(self.engines.stream(attempt.leg(decode, body)))
                reply = await begin(decode, stream)
            if reply.rest is not None:
                await opening.enter_async_context(aclosing(reply.rest))
            attempt.opened.push_async_exit(opening.pop_all())  # nothing is awaited any more: it is ours or theirs
            return reply

    def _once_more(self, attempt: _Attempt, failed: LegFailed) -> None:
        """Return if the request may be sent again, else raise what the client is told."""
        role = failed.instance.role
        if not attempt.chances.take(failed, self.registry.known(role)):
            raise failed.error
        attempt.journey.set_aside(role, failed.failure)
        attempt.journey.start_over()

    @contextmanager
    def _forgetting(self, prefill: Instance) -> Generator[None]:
        """Forget an engine that fails: it may come back as another one."""
        try:
            yield
        except LegFailed as failed:
            if failed.failure is not Failure.REFUSED:
                self.learned.forget(prefill.id)
            raise

    @contextmanager
    def _timed(self, visit: Visit) -> Generator[None]:
        start = self.clock()
        try:
            yield
        finally:
            visit.ms = (self.clock() - start) * 1000


@contextmanager
def _failing(instance: Instance) -> Generator[None]:
    try:
        yield
    except (EngineError, Refused) as error:
        raise LegFailed(instance, error) from error


def _is_good(decoding: asyncio.Task[Reply]) -> bool:
    return decoding.done() and decoding.exception() is None


def _note_late_fault(prefilling: asyncio.Task[Handover], journey: Journey) -> None:
    """Log that a prefill failed although the decode engine had its answer; the client is not concerned."""
    if prefilling.done() and not prefilling.cancelled() and (error := prefilling.exception()) is not None:
        journey.late = str(error)
