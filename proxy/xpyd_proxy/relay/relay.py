"""Picks two engines, sends the two legs, and sends them again where that is right."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from xpyd_proxy.core import dialect, push
from xpyd_proxy.core.asking import ask_of_call, ask_of_errand
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.learned import Learned
from xpyd_proxy.core.model import Call, Errand, Handover, Instance, InstanceId, Push, Role, Solo, TransferId
from xpyd_proxy.core.ports import Fleet, Pairing, RetryBudget, Slots, Uncounted, Unlimited, nothing
from xpyd_proxy.core.push import Manner
from xpyd_proxy.core.raw_json import Fields, encode
from xpyd_proxy.core.replay import Replay, can_resume, traced
from xpyd_proxy.core.retries import Again, Chances, Failure, LegFailed
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.core.rules import Rules
from xpyd_proxy.core.said import Coordinates
from xpyd_proxy.errors import NoInstance, OutOfTime
from xpyd_proxy.io.ids import new_transfer
from xpyd_proxy.relay.attempt import Attempt, Loan, Outline, Stop
from xpyd_proxy.relay.legs import Legs
from xpyd_proxy.relay.opened import Block, Opened
from xpyd_proxy.relay.releasing import Releaser
from xpyd_proxy.relay.reply import Reply
from xpyd_proxy.relay.resuming import Resuming
from xpyd_proxy.relay.steps import Handovers, decode_body, prefill_body, unheard
from xpyd_proxy.relay.tasks import running
from xpyd_proxy.relay.waiting import at_most


@dataclass(slots=True)
class Relay:
    """Serves requests. It is handed everything it uses, and builds nothing."""

    registry: Fleet
    legs: Legs
    pairing: Pairing
    learned: Learned
    manner: Manner
    releaser: Releaser
    rules: Rules  # may be replaced at any time: requests that come later go by the new ones
    slots: Slots = field(default_factory=Uncounted)
    budget: RetryBudget = field(default_factory=Unlimited)
    new_transfer: Callable[[], TransferId] = new_transfer
    replaced: Callable[[Instance, str], None] = unheard  # a prefill engine named a host where nobody can reach it

    def serve(self, call: Call, journey: Journey) -> AbstractAsyncContextManager[Reply]:
        """Enter with the engine's good answer in hand; leaving closes what is still open upstream.

        Raises:
            NoInstance: there is no engine to serve the request.
            Refused: an engine says that the client is at fault.
            OutOfTime: the request has taken longer than a request may.
            EngineError: an engine failed before anything was shown to the client, and so did the other tries.
        """
        return Block(partial(self._serve, call, journey))

    def run(self, errand: Errand, journey: Journey) -> AbstractAsyncContextManager[Reply]:
        """Have one engine do what needs no second one; raises what ``serve`` raises."""
        journey.solo = Solo.ONE_LEG
        return Block(partial(self._run, errand, journey))

    async def _serve(self, call: Call, journey: Journey, opened: Opened) -> Reply:
        outline = Outline(call.path, call.headers, ask_of_call(call), call.streams)
        self.budget.came(now=self.legs.clock())
        if not self._may_resume(call):
            return await self._answer(outline, journey, opened, partial(self._try, call))
        asked = replace(call, fields=traced(call.fields))
        legs = Opened()
        opened.push_async(lambda _kind, error, _trace: legs.close(error))
        begun = structs.replace(outline, since=asyncio.get_running_loop().time())
        take_over = partial(self._take_over, begun, journey, legs)
        resuming = Resuming(Replay(call.api, call.fields), take_over, self.rules.retries)
        reply = resuming.of(await self._answer(outline, journey, legs, partial(self._try, asked)))
        if (rest := reply.rest) is not None:
            opened.push_async(lambda _kind, _error, _trace: rest.aclose())
        return reply

    def go_on(self, call: Call, begun: Attempt, stop: Stop) -> AbstractAsyncContextManager[Reply]:
        """Serve a request whose first try has come so far on the short way (relay/ride.py); raises as ``serve``."""
        return Block(partial(self._go_on, call, begun, stop))

    async def _go_on(self, call: Call, begun: Attempt, stop: Stop, opened: Opened) -> Reply:
        first = partial(self._from, call, begun, stop)
        return await self._answer(begun.of, begun.journey, opened, partial(self._try, call), first=first)

    async def _from(self, call: Call, begun: Attempt, stop: Stop, attempt: Attempt) -> Reply:
        """Go on where the short way ended: both engines were chosen, and a leg has failed."""
        attempt.counted.prefill = begun.counted.prefill
        if stop.handover is not None:
            loan = Loan(stop.prefill, stop.due, stop.sent)
            return await self._hand_over(call, attempt, stop.decode, stop.handover, loan, failed=stop.error)
        if isinstance(stop.error, LegFailed):
            self.unlearn(stop.error)
        raise stop.error

    async def _run(self, errand: Errand, journey: Journey, opened: Opened) -> Reply:
        outline = Outline(errand.path, errand.headers, ask_of_errand(errand), content_type=errand.content_type)
        self.budget.came(now=self.legs.clock())
        return await self._answer(outline, journey, opened, partial(self._alone, errand.body))

    async def _answer(
        self,
        outline: Outline,
        journey: Journey,
        opened: Opened,
        send: Callable[[Attempt], Awaitable[Reply]],
        avoided: set[InstanceId] | None = None,
        *,
        first: Callable[[Attempt], Awaitable[Reply]] | None = None,
    ) -> Reply:
        """Try until there is a good answer; what it needs open is then on the caller's stack.

        ``first``: how the first try is made, if not as the others.
        """
        rules = self.rules
        seconds = rules.patience.total_s(streams=outline.streams)
        chances = Chances(rules.retries, avoided or set())
        failed: LegFailed | None = None
        async with at_most(seconds, lambda s: OutOfTime(f"the request was not done within {s:g} s")) as limit:
            if outline.since is not None and seconds is not None:
                limit.reschedule(outline.since + seconds)
            while True:
                attempt = Attempt(
                    outline,
                    journey,
                    chances,
                    rules.patience,
                    limit.when(),
                    journey.attempt_id,
                    self.new_transfer(),
                )
                try:
                    reply = await attempt.opened.kept((first or send)(attempt))
                    opened.take(attempt.opened)
                    return reply
                except LegFailed as now_failed:  # by now both legs are closed
                    failed, first = now_failed.with_traceback(None), None  # it leads here: a circle
                except NoInstance:
                    if failed is None:
                        raise
                    raise failed.error from None
                self._once_more(attempt, failed)

    def _may_resume(self, call: Call) -> bool:
        return self.rules.resume and can_resume(call.api, call.fields) and solo_reason(call.api, call.fields) is None

    async def _take_over(self, outline: Outline, journey: Journey, legs: Opened, fields: Fields) -> Reply:
        """Have another decode engine go on with a stream, alone: the first one's legs are closed before."""
        await legs.close()
        if not self.budget.grants(now=self.legs.clock()):
            raise NoInstance("too many requests are being sent again")
        broken: set[InstanceId] = set() if journey.decode is None else {journey.decode.instance}
        journey.set_aside(Role.DECODE, Failure.BROKEN)
        return await self._answer(outline, journey, legs, partial(self._alone, encode(fields)), broken)

    async def _try(self, call: Call, attempt: Attempt) -> Reply:
        attempt.journey.solo = self.solo(call)
        pair = None if attempt.journey.solo else self._pair(attempt)
        if pair is None:
            return await self._alone(encode(call.fields), attempt)
        prefill, decode = pair
        told = self.learned.coordinates(prefill.id)
        if told is None:
            return await self._in_turn(call, attempt, prefill, decode)
        return await self._at_once(call, attempt, prefill, decode, told)

    def solo(self, call: Call) -> Solo | None:
        """Return why one engine must serve a request alone; None: it can be split."""
        return solo_reason(call.api, call.fields, min_prompt_chars=self.rules.min_prompt_chars)

    def _pair(self, attempt: Attempt) -> tuple[Instance, Instance] | None:
        """Choose two engines; None: there is no prefill engine, and the request is for one."""
        among, ask = attempt.chances.among, attempt.ask
        decodes = among(self.registry.usable(Role.DECODE))
        try:
            return self.pairing.pair(among(self.registry.usable(Role.PREFILL)), decodes, ask)
        except NoInstance:
            if not self.rules.alone_without_prefill:
                raise
        attempt.journey.solo = Solo.NO_PREFILL
        return None

    async def _alone(self, body: bytes, attempt: Attempt) -> Reply:
        candidates = attempt.chances.among(self.registry.usable(Role.DECODE))
        return await self._decode(attempt, self.pairing.one(candidates, attempt.ask), body)

    async def _in_turn(self, call: Call, attempt: Attempt, prefill: Instance, decode: Instance) -> Reply:
        """Tell the decode engine what the prefill engine has answered."""
        with self.slots.hold(decode, attempt.request):
            handover = await self._prefill(call, attempt, prefill)
        loan = Loan(prefill, self.legs.clock() + attempt.patience.handoff_s)
        return await self._hand_over(call, attempt, decode, handover, loan)

    async def _hand_over(
        self,
        call: Call,
        attempt: Attempt,
        decode: Instance,
        handover: Handover,
        loan: Loan,
        *,
        failed: LegFailed | OutOfTime | None = None,
    ) -> Reply:
        """Send the decode leg that follows a prefill leg, unless it has just failed so."""
        body = b"".join(decode_body(call, attempt.journey, attempt.request, handover))
        try:
            return await self._decode(attempt, decode, body, loan, failed)
        finally:
            if not loan.taken and handover.coordinates is None:
                self.give_back(call, attempt, loan.prefill, handover)

    async def _at_once(
        self, call: Call, attempt: Attempt, prefill: Instance, decode: Instance, told: Coordinates
    ) -> Reply:
        """Send both legs, and drop the one when the other fails. The decode engine may well answer first."""
        attempt.journey.push, attempt.journey.transfer = Push.AT_ONCE, attempt.transfer
        params = push.decode_params(told, call.api, attempt.request, attempt.transfer)
        body = dialect.decode_body(dialect.named(call.api, call.fields, attempt.request), params)
        start, hold = attempt.opened.enter, self.slots.hold
        # until the legs have begun, which the event loop does in its own time
        with hold(prefill, attempt.request), hold(decode, attempt.request):
            prefilling = await start(running(self._prefill(call, attempt, prefill, told)))
            decoding = await start(running(self._decode(attempt, decode, body, Loan(prefill))))
            await asyncio.sleep(0)
        await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
        if prefilling.done() and not _is_good(decoding):
            prefilling.result()  # that it failed may be why the other one did
        reply = await decoding
        attempt.opened.push(lambda _kind, _error, _trace: _note_late_fault(prefilling, attempt.journey))
        return reply

    async def _prefill(
        self, call: Call, attempt: Attempt, prefill: Instance, told: Coordinates | None = None
    ) -> Handover:
        """Get the prompt computed, and learn where the engine is; ``told``: what the decode engine was told of it."""
        reuses = self.rules.reuse_tokens and told is None
        take = Handovers(self.learned, self.manner, self.replaced).take
        try:
            return await self.legs.prefill(
                attempt,
                prefill,
                b"".join(prefill_body(call, attempt.request, attempt.transfer, reuses=reuses)),
                lambda answer: take(
                    call, attempt.request, attempt.transfer, prefill, told=told, answer=answer, reuses=reuses
                ),
            )
        except LegFailed as failed:
            self.unlearn(failed)
            raise

    def unlearn(self, failed: LegFailed) -> None:
        """Forget where an engine is whose leg has failed: it may come back as another one.

        One that has moved has just been learned.
        """
        if failed.failure not in (Failure.REFUSED, Failure.BUSY, Failure.MOVED):
            self.learned.forget(failed.instance.id)

    async def _decode(
        self,
        attempt: Attempt,
        decode: Instance,
        body: bytes,
        loan: Loan | None = None,
        failed: LegFailed | OutOfTime | None = None,
    ) -> Reply:
        """Get a good answer from a decode engine, or from another one if this one got nothing of the request.

        ``failed``: how this one has failed already, if it has.
        """
        while True:
            try:
                if failed is not None:
                    raise failed
                return await self._decode_here(attempt, decode, body, loan.take if loan else nothing)
            except LegFailed as now_failed:
                others = self._others(attempt, decode, loan)
                if not self._moves_on(attempt, now_failed, others):
                    raise
                attempt.journey.set_aside(Role.DECODE, now_failed.failure)
            decode, failed = self.pairing.one(attempt.chances.among(others), attempt.ask), None

    def _moves_on(self, attempt: Attempt, failed: LegFailed, others: Sequence[Instance]) -> bool:
        """Tell whether another decode engine may take over the leg."""
        return failed.rule.again is Again.DECODE and bool(others) and self._may_repeat(attempt, failed, others)

    def _others(self, attempt: Attempt, failed: Instance, loan: Loan | None) -> Sequence[Instance]:
        """List the engines that may get the decode leg of one that could not be reached.

        They must be able to read the blocks. None: it is too late for these, or another pair has better chances.
        """
        decodes = self._usable(Role.DECODE)
        if loan is None:
            return decodes
        if loan.due is not None and self.legs.clock() >= loan.due:
            return ()
        fitting = self.registry.fitting(loan.prefill, decodes)
        fresh = [instance for instance in fitting if instance.id not in attempt.chances.avoided | {failed.id}]
        return fresh if fresh or len(fitting) < len(decodes) else fitting

    async def _decode_here(self, attempt: Attempt, decode: Instance, body: bytes, sent: Callable[[], None]) -> Reply:
        hold = self.slots.hold(decode, attempt.request)
        hold.__enter__()
        try:
            reply = await self.legs.decode(attempt, decode, body, sent)
        except BaseException as error:
            hold.__exit__(type(error), error, error.__traceback__)
            raise
        attempt.opened.push(hold.__exit__)
        return reply

    def give_back(self, call: Call, attempt: Attempt, prefill: Instance, handover: Handover) -> None:
        """Free the blocks of a prefill whose decode leg was never sent; the client does not wait for it."""
        body = dialect.release_body(call.fields, handover.params)
        visit = attempt.journey.decode
        tried = None if visit is None else visit.instance  # it may be why the leg was not sent: it is asked last
        fitting = attempt.chances.first(self.registry.fitting(prefill, self._usable(Role.DECODE)))
        decodes = sorted(fitting, key=lambda instance: instance.id == tried)
        self.releaser.release(prefill, [attempt.leg(decode, body, dialect.RELEASE_PATH) for decode in decodes])

    def _once_more(self, attempt: Attempt, failed: LegFailed) -> None:
        """Return if the request may be sent again, else raise what the client is told."""
        role = failed.instance.role
        if not self._may_repeat(attempt, failed, self._usable(role)):
            raise failed.error
        attempt.journey.set_aside(role, failed.failure)
        attempt.journey.start_over()

    def _may_repeat(self, attempt: Attempt, failed: LegFailed, others: Sequence[Instance]) -> bool:
        return attempt.chances.take(failed, others) and self.budget.grants(now=self.legs.clock())

    def _usable(self, role: Role) -> Sequence[Instance]:
        try:
            return self.registry.usable(role)
        except NoInstance:
            return ()


def _is_good(decoding: asyncio.Task[Reply]) -> bool:
    return decoding.done() and decoding.exception() is None


def _note_late_fault(prefilling: asyncio.Task[Handover], journey: Journey) -> None:
    """Log that a prefill failed although the decode engine had its answer; the client is not concerned."""
    if prefilling.done() and not prefilling.cancelled() and (error := prefilling.exception()) is not None:
        journey.late = str(error)
