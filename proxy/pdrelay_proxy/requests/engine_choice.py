"""The engines of one try of a request: who is chosen, and the slot that is held at one until its
leg is sent.
"""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.model import Instance, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.handoff import handoff_timeout
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.core.routing.route import Route, choose_decode, route
from pdrelay_proxy.errors import NoInstance
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.legs import PrefillLeg
from pdrelay_proxy.settings import Settings

# what the engine has decided
_BY_CACHE: Final = (SingleEngineReason.CACHED, SingleEngineReason.FASTER)
_DECODE: Final = Role.DECODE  # looking a member up takes as long as a call


class EngineChoice:
    """Chooses them, and remembers what the choice was about."""

    __slots__ = (
        "_record",
        "_settings",
        "expected",
        "fleet",
        "mode",
        "plan",
        "prefill",
        "request",
        "retries",
        "slot",
    )

    def __init__(  # noqa: PLR0917 (by name it costs more than the rest of it)
        self,
        fleet: LiveFleet,
        plan: RequestPlan,
        settings: Settings,
        retries: RetryAttempts,
        record: RequestRecord,
        request: RequestId,
    ) -> None:
        """``request``: what engines know this try by."""
        self.fleet = fleet
        self.plan = plan
        self._settings = settings
        self.retries = retries
        self._record = record
        self.request = request
        # what the engines were chosen by, until the decode leg is sent
        self.expected: ExpectedTime | None = None
        self.mode: TransferMode | None = None  # for two engines that can do either
        self.prefill: Instance | None = None  # the engine that the prompt was sent to
        # a decode engine whose slot is held until its leg is sent
        self.slot: Instance | None = None

    def hold_slot(self, decode: Instance) -> None:
        """Hold a slot at the decode engine until its leg is sent: the handover must not wait."""
        fleet = self.fleet
        fleet.enter(decode, self.request)
        self.slot = decode
        for listener in fleet.listeners:
            listener.slot_held(decode, self.request)

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
        record = self._record
        plan = self.plan
        chosen = route(
            self.fleet, plan.hints, plan.path, self.retries, self._settings, reason=reason
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
        self, failed: Instance, lent_by: PrefillLeg | None, *, now: float
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
            return () if self._record.single_reason in _BY_CACHE else decodes
        if lent_by is not None and lent_by.handover is not None:
            limit = handoff_timeout(lent_by.handover.params)
            if now >= lent_by.handed_over_at + limit:
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
        decode = self._record.decode
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
            self.fleet.leave(slot, self.request)
