"""One try of a request: what it goes by, what engines know it by, and the engines that are chosen.

A request that is sent again gets another attempt, with another id for both engines: they match
their halves by it. requests/attempt_legs.py has its legs.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.model import GenerationRequest, Instance, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.handoff import handoff_timeout
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.raw_json import Pieces
from pdrelay_proxy.core.routing.retries import LegFailed, RetryAttempts
from pdrelay_proxy.core.routing.route import Route, choose_decode, route
from pdrelay_proxy.errors import NoInstance, ProxyError
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.legs import PrefillLeg
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.settings import Settings

# what the engine has decided
_BY_CACHE: Final = (SingleEngineReason.CACHED, SingleEngineReason.FASTER)
_DECODE: Final = Role.DECODE


class Terms:
    """Of one run of tries: what is not overridden is as for any request.

    A class, because a compiled call of a Protocol is slow.
    """

    __slots__ = ("call", "can_open", "can_split", "ids", "is_takeover", "retries")

    def __init__(
        self,
        call: GenerationRequest | None,
        retries: RetryAttempts,
        *,
        can_split: bool = False,
        can_open: bool = False,
    ) -> None:
        """``call``: what two engines are asked; None: the endpoint generates no text.

        ``can_split``: its fields were looked at, and need no engine of their own; ``can_open``: its
        stream may begin with what a prefill engine has answered.
        """
        self.call = call
        self.retries = retries
        self.can_split = can_split
        self.can_open = can_open
        self.ids: msgspec.Raw | None = None  # of a chat's prompt, in place of its messages
        # A stream that engines take over from another one that still has it, until they have begun.
        self.is_takeover = False

    def choose(self, attempt: "Attempt", /) -> tuple[Instance | None, Instance]:
        """Choose the prefill engine and the decode engine; None: the latter serves it alone."""
        raise NotImplementedError

    def body_alone(self, attempt: "Attempt", /) -> Pieces:
        """Return what a decode engine is asked that serves it alone."""
        return attempt.plan.body

    def take_retry(
        self, failed: LegFailed, others: Sequence[Instance], *, may_be_alone: bool
    ) -> bool:
        """Tell whether there is another try, with so many engines of that role, and count it."""
        return self.retries.take(failed, others, may_be_alone=may_be_alone)

    def seconds_for(self, _engine: Instance, /) -> float:
        """Return how long an engine may take for its part in a takeover."""
        return math.inf

    def limit(self, engine: Instance, /) -> str:
        """Say how long that is, for an error."""
        return f"{self.seconds_for(engine):g} s"

    def handed_over(self, prefill: Instance, /) -> None:
        """Hear that a prefill engine has the KV cache of the prompt."""

    def leg_failed(self, engine: Instance, /) -> None:
        """Hear that the leg of an engine has failed."""

    def begun(self) -> None:
        """Hear that a stream has begun to be shown."""

    def instead(self, error: ProxyError, /) -> "Terms":
        """Return what a takeover goes on with after its tries; raises ProxyError: with nothing."""
        raise error

    def rest(self, retries: RetryAttempts, body: Pieces, /) -> "Terms":
        """Return those for the rest of a stream that broke off; ``body``: what one is asked."""
        raise NotImplementedError

    def give_up(self, error: Exception, /) -> None:
        """Hear what the request ends with."""


class Attempt:
    """One try."""

    __slots__ = (
        "expected",
        "fleet",
        "id",
        "life",
        "mode",
        "plan",
        "prefill",
        "retries",
        "settings",
        "slot",
        "terms",
        "transfer",
    )

    def __init__(
        self, life: RequestLife, plan: RequestPlan, settings: Settings, terms: Terms
    ) -> None:
        """``settings``: those that were in force when the request was admitted."""
        record = life.record
        services = life.services
        self.life = life
        self.plan = plan
        self.settings = settings
        self.terms = terms
        self.retries = terms.retries
        self.fleet = services.fleet
        # what engines know this try by, and the KV blocks of it
        self.id = record.attempt_id if record.retries or record.moves else record.request_id
        self.transfer = services.new_transfer()
        # what the engines were chosen by, until the decode leg is sent
        self.expected: ExpectedTime | None = None
        self.mode: TransferMode | None = None  # for two engines that can do either
        self.prefill: Instance | None = None  # the engine that the prompt was sent to
        # a decode engine whose slot is held until its leg is sent
        self.slot: Instance | None = None

    def hold_slot(self, decode: Instance) -> None:
        """Hold a slot at the decode engine until its leg is sent: the handover must not wait."""
        fleet = self.fleet
        fleet.enter(decode, self.id)
        self.slot = decode
        for listener in fleet.listeners:
            listener.slot_held(decode, self.id)

    def usable(self, role: Role) -> Sequence[Instance]:
        """List the engines of a role that may get the request, or its rest, now."""
        try:
            return self.with_same_files(self.fleet.usable(role))
        except NoInstance:
            return ()

    def with_same_files(self, engines: Sequence[Instance]) -> Sequence[Instance]:
        """Leave out the engines with other files of the model than the stream has begun with."""
        return self.fleet.with_files(engines, self.plan.hints.model, self.plan.files)

    def route(self, reason: SingleEngineReason | None) -> Route:
        """Choose the engines; ``reason``: what of the request says that it must be one."""
        record = self.life.record
        plan = self.plan
        chosen = route(
            self.fleet, plan.hints, plan.path, self.retries, self.settings, reason=reason
        )
        record.single_reason = chosen.reason
        if chosen.cached is not None:
            record.cached = chosen.cached
        self.mode = chosen.mode
        self.expected = chosen.expected
        return chosen

    def choose_decode(self, among: Sequence[Instance]) -> Instance:
        """Choose a decode engine."""
        fleet = self.fleet
        chosen = choose_decode(fleet, self.plan.hints, self.plan.path, self.retries, among)
        self.note_expected()
        return chosen

    def note_expected(self) -> None:
        """Keep what is expected of the engines that were just chosen."""
        expected = self.fleet.pairs.take_expected(self.plan.hints)
        if expected is not None and self.prefill is None:
            self.expected = expected

    def others(
        self, failed: Instance, lender: PrefillLeg | None, *, now: float
    ) -> Sequence[Instance]:
        """List the engines that may get the decode leg of one that could not be reached.

        They must be able to read the blocks. None: it is too late for these, or another pair has
        better chances.
        """
        fleet = self.fleet
        decodes = self.usable(_DECODE)
        prefill = self.prefill
        if prefill is None:
            # The engine that failed was to serve it alone because of its cache: others may need a
            # prefill engine.
            return () if self.life.record.single_reason in _BY_CACHE else decodes
        if lender is not None and lender.handover is not None:
            limit = handoff_timeout(lender.handover.params)
            if now >= lender.handed_over_at + limit:
                return ()
        fitting = fleet.registry.fitting(prefill, decodes, self.plan.hints.model)
        fresh = [
            instance
            for instance in fitting
            if instance.id not in self.retries.avoided | {failed.id}
        ]
        return fleet.nearest(prefill, fresh if fresh or len(fitting) < len(decodes) else fitting)

    def readers(self, prefill: Instance) -> Sequence[Instance]:
        """List the decode engines that can read from a prefill engine, those first that have not
        failed the request.

        The one that had the decode leg comes last: it may be why the leg was not sent.
        """
        decode = self.life.record.decode
        tried = None if decode is None else decode.instance
        decodes = self.usable(_DECODE)
        fitting = self.retries.first(
            self.fleet.registry.fitting(prefill, decodes, self.plan.hints.model)
        )
        return sorted(fitting, key=lambda instance: instance.id == tried)

    def leave_slot(self) -> None:
        """Give back the slot that is held, if one is."""
        slot = self.slot
        self.slot = None
        if slot is not None:
            self.fleet.leave(slot, self.id)
