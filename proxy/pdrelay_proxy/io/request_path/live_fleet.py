"""The engines as the relay meets them: reads the clock, and asks and tells the cores."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Key
from pdrelay_proxy.core.fleet.compatibility import MODES, EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.load import read_report
from pdrelay_proxy.core.fleet.missing_paths import MissingPaths
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    RequestId,
    Role,
    RoutingHints,
)
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.prompt_ids import may_pass_ids, takes_chat_ids
from pdrelay_proxy.core.protocol.push import EngineMode, TransferMode
from pdrelay_proxy.core.routing.fleet_choice import FleetChoice
from pdrelay_proxy.core.routing.leg_listener import LegListener
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.prompt_id_reader import PromptIdReader
from pdrelay_proxy.core.routing.retries import BrokenAnswer
from pdrelay_proxy.io.request_path.cache_learning import CacheLearning
from pdrelay_proxy.io.request_path.caches import Caches
from pdrelay_proxy.io.request_path.deferred import DeferredCalls

_CHAT: Final = Api.CHAT
_PREFILL: Final = Role.PREFILL
_AUTO: Final = EngineMode.AUTO
_HALF_OPEN: Final = HealthState.HALF_OPEN


class Loads:
    """How busy engines are, for policies."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._find = registry.get
        self._clock = clock  # seconds; the one of the fleet

    def of(self, instance: Instance) -> float:
        """Return a number that is higher the busier an engine is."""
        member = self._find(instance.id)
        return 0.0 if member is None else member.load.score(self._clock())

    def kv_usage(self, instance: Instance) -> float | None:
        """Return the share of an engine's KV cache in use, as it showed last; None: unknown."""
        member = self._find(instance.id)
        return None if member is None else member.load.kv_usage(now=self._clock())


class LiveFleet(FleetChoice):
    """Requests choose from it, and tell it what became of their legs; what it is told of removed
    engines is dropped.
    """

    def __init__(
        self,
        registry: Registry,
        pairs: PairSelector,
        learned: PushCoordinates,
        clock: Callable[[], float],
        caches: Caches | None = None,
        *,
        remembers: bool = False,
        id_reader: PromptIdReader | None = None,
        added: Sequence[LegListener] = (),
        fixed_mode: TransferMode | None = None,
        later: DeferredCalls | None = None,
    ) -> None:
        """``added``: learn from legs, too; ``fixed_mode``: as in FleetChoice.

        ``later``: what went well and has yet to be told here.
        """
        super().__init__(
            registry,
            pairs,
            MissingPaths(registry),
            clock,
            fixed_mode=fixed_mode,
            remembers=remembers,
            counts=True,
        )
        self.caches = caches  # None: no policy asks for them
        self.id_reader = id_reader  # None: nobody asks for the tokens of texts
        listeners = list(added)
        if caches is not None:  # before all others: what is sent to an engine is new to it
            listeners.insert(0, CacheLearning(caches, registry, clock, remembers=remembers))
        self.listeners: Sequence[LegListener] = listeners  # what learns from legs
        timing = [listener for listener in listeners if listener.times_streams]
        # What learns from the seconds between tokens; None: nobody asks for them by engine.
        self.stepped = partial(_stepped, timing) if timing else None
        self._learned = learned  # what prefill engines say in their answers
        self._load_changed: Callable[[InstanceId], None] | None = None
        self.later = DeferredCalls() if later is None else later

    @property
    def bounds(self) -> Counter[Key]:
        """Counts the prompts that decode engines leave to others, to spare their streams."""
        return Counter() if self.pairs.bound is None else self.pairs.bound.counts

    def tell_load_changes(self, hear: Callable[[InstanceId], None]) -> None:
        """Have this called with each engine that gets a request or loses one.

        The exchange with other routers says so when it is built: it counts its datagrams among the
        router's counters, some of which are kept here.
        """
        self._load_changed = hear

    def serves(self, role: Role, address: Address, facts: EngineCapabilities) -> None:
        """Take in what is known of an engine that was just added, and not probed."""
        for instance in self.known(role):
            if instance.address == address:
                self.registry.learn(instance.id, facts)

    def lacks_path(self, path: str, instance: Instance) -> None:
        """An engine has said that it has no such path."""
        self.later.settle()  # what it has served before
        self.missing.denied(path, instance.id, now=self._clock())

    def has_paths(self, paths: Iterable[str], instance: Instance) -> None:
        """An engine has given good answers for some paths."""
        now = self._clock()
        for path in paths:
            self.missing.served(path, instance.id, now=now)

    def readers(self, lender: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that may read from one that a stream leaves."""
        tries = self.pair_history.reader_to_try(lender, decode, now=self._clock())
        return self.registry.fitting(lender, decode) if tries is None else (tries,)

    def nearest(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave the decode engines that are a prefill engine's best partners."""
        return decode if self.preference is None else self.preference.nearest(prefill, decode)

    def took_over(self, prefill: Instance, decode: Instance, hints: RoutingHints, /) -> None:
        """Another decode engine has got the leg of one that could not be reached."""
        if self.preference is not None:
            self.preference.note(prefill, decode, hints.once_more())

    def takes_chat_ids(self, decode: Instance) -> bool:
        """Tell whether a decode engine takes a chat's prompt as ids, where that is exact."""
        member = self.registry.get(decode.id)
        return member is not None and takes_chat_ids(member.facts.version)

    def passes_ids(self, call: GenerationRequest, decode: Instance) -> bool:
        """Tell whether a decode engine can get the ids of a request's prompt in place of its text,
        or messages.
        """
        return (call.api is not _CHAT or self.takes_chat_ids(decode)) and may_pass_ids(
            call.api, call.fields
        )

    def all_answered(self, instance: Instance, requests: Sequence[RequestId], /) -> None:
        """An engine has given some good answers."""
        if (member := self.registry.get(instance.id)) is not None:
            member.life.succeeded(requests, self._clock())
            mode = (
                MODES.get(self._learned.state(instance.id)) if instance.role is _PREFILL else None
            )
            if mode is not None and member.facts.mode not in (mode, _AUTO):
                self.registry.learn(instance.id, EngineCapabilities(mode=mode))

    def completed(self, instance: Instance) -> None:
        """An answer of an engine has come to its end."""
        if (member := self.registry.get(instance.id)) is not None:
            member.life.completed()

    def ended(
        self,
        instance: Instance,
        request: RequestId,
        failure: Failure | None,
        /,
        *,
        was_begun: bool = False,
    ) -> None:
        """It is closed; ``was_begun``: it has failed behind the first event of a stream."""
        if failure is not None and (member := self.registry.get(instance.id)) is not None:
            self.later.settle()  # what went well before
            member.life.failed(request, failure, now=self._clock(), was_begun=was_begun)
        self.leave(instance, request)

    def blamed(self, instance: Instance, failure: Failure) -> None:
        """Another engine has answered well what this one has failed."""
        if (member := self.registry.get(instance.id)) is not None:
            self.later.settle()  # what went well before
            member.life.blamed(failure, now=self._clock())

    def broke_off(self, broken: BrokenAnswer) -> None:
        """An engine is held to account for an answer that it has not brought to its end."""
        if not (broken.is_break or broken.is_stream):
            self.blamed(broken.instance, broken.failure)
        elif (member := self.registry.get(broken.instance.id)) is not None:
            self.later.settle()  # what went well before
            member.life.broke_off(broken.failure, was_begun=broken.is_stream, now=self._clock())

    def reported(self, instance: Instance, header: bytes) -> None:
        """An engine has said how busy it is (``endpoint-load-metrics``)."""
        report = read_report(header)
        if report is not None and (member := self.registry.get(instance.id)) is not None:
            member.load.reported(report, now=self._clock())

    def enter(self, instance: Instance, request: RequestId) -> None:
        """Count a request at an engine; it may enter several times, and counts once."""
        if (member := self.registry.get(instance.id)) is not None:
            member.load.enter(request)
            if self._load_changed is not None:
                self._load_changed(instance.id)
            if member.life.state is _HALF_OPEN:
                member.life.claimed(request)

    def leave(self, instance: Instance, request: RequestId) -> None:
        """Stop to count it when it has left as often."""
        if (member := self.registry.get(instance.id)) is not None and member.load.leave(request):
            if self._load_changed is not None:
                self._load_changed(instance.id)
            for listener in self.listeners:
                listener.left(instance, request)
            if member.life.state is _HALF_OPEN:
                self.later.settle()  # that it has served its trial may be among what waits
            if member.life.trial is not None:
                member.life.released(request)


def _stepped(listeners: Sequence[LegListener], decode: InstanceId, gaps: list[float]) -> None:
    for listener in listeners:
        listener.stepped(decode, gaps)
