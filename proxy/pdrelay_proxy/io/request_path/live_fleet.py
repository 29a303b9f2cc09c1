"""The engines as the relay meets them: reads the clock, and asks and tells the cores."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Key
from pdrelay_proxy.core.fleet.compatibility import MODES, EngineCapabilities, fit
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.load import read_report
from pdrelay_proxy.core.fleet.missing_paths import MissingPaths
from pdrelay_proxy.core.fleet.pair_modes import PairModes
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import (
    ANY,
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    RequestId,
    Role,
    RoutingHints,
    SingleEngineReason,
)
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.kv_transfer_check import cached_share
from pdrelay_proxy.core.protocol.prompt_ids import may_pass_ids, may_tell_ids, takes_chat_ids
from pdrelay_proxy.core.protocol.push import EngineMode, TransferMode
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.pairing import Chosen, PairSelector
from pdrelay_proxy.core.routing.retries import BrokenAnswer
from pdrelay_proxy.core.routing.slices import SliceCrossings, nearest
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.errors import NoInstance
from pdrelay_proxy.io.request_path.caches import Caches
from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from pdrelay_proxy.io.request_path.prompt_learner import PromptLearner
from pdrelay_proxy.settings import SlicePairing

if TYPE_CHECKING:
    from pdrelay_proxy.io.request_path.engine_costs import EngineCosts

_CHAT: Final = Api.CHAT  # looking a member up takes as long as a call
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_OURS: Final = "pdrelay"  # an engine's metrics show which connector it has
_FAR: Final = 0.5  # of what was expected in a cache: with less the engine has evicted it; blocks are whole ones
_BY_CACHE: Final = (SingleEngineReason.CACHED, SingleEngineReason.FASTER)
_AUTO: Final = EngineMode.AUTO
_HALF_OPEN: Final = HealthState.HALF_OPEN  # looking a member up takes as long as a call


class Loads:
    """How busy engines are, for policies."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._find = registry.get
        self._clock = clock  # seconds; the one of the fleet

    def of(self, instance: Instance) -> float:
        """Return a number that is higher the busier an engine is."""
        member = self._find(instance.id)
        return 0.0 if member is None else member.load.score(self._clock())


class LiveFleet:
    """A Fleet, a Pairing, Slots and a Watcher. What it is told of engines that were removed is dropped."""

    def __init__(
        self,
        registry: Registry,
        pairs: PairSelector,
        learned: PushCoordinates,
        clock: Callable[[], float],
        caches: Caches | None = None,
        *,
        remembers: bool = False,
        learner: PromptLearner | None = None,
        costs: "EngineCosts | None" = None,
        modes: PairModes | None = None,
        later: DeferredCalls | None = None,
    ) -> None:
        """``modes``: of pairs that can pull and push; ``later``: what went well and has yet to be told here."""
        self.registry = registry
        self.caches = caches  # None: no policy asks for them
        self.remembers = remembers  # the policy of decode engines asks for them
        self.learner = learner  # None: nobody asks for the tokens of texts
        self.costs = costs  # None: no policy asks what engines take for a request
        self.missing = MissingPaths(registry)
        self._pairs = pairs
        self._learned = learned  # what prefill engines say in their answers
        self._clock = clock  # seconds; only differences count
        self._load_changed: Callable[[InstanceId], None] | None = None
        # None: slices play no part, or no pair is of two.
        self.crossings = SliceCrossings(registry) if registry.slice_pairing is SlicePairing.PREFER else None
        self.modes = PairModes() if modes is None else modes
        self.later = DeferredCalls() if later is None else later

    @property
    def stepped(self) -> Callable[[InstanceId, list[float]], None] | None:
        """What learns from the seconds between tokens; None: no policy asks for them."""
        return None if self.costs is None else self.costs.stepped

    @property
    def bounds(self) -> Counter[Key]:
        """The counter of prompts that decode engines leave to others for the sake of their streams."""
        return Counter() if self._pairs.bound is None else self._pairs.bound.counts

    def tell_load_changes(self, hear: Callable[[InstanceId], None]) -> None:
        """Have this called with each engine that gets a request or loses one.

        The exchange with other routers says so when it is built: it counts its datagrams among the router's counters,
        some of which are kept here.
        """
        self._load_changed = hear

    def known(self, role: Role, /) -> Sequence[Instance]:
        """List all engines of a role."""
        return self.registry.known(role)

    def serves(self, role: Role, address: Address, found: EngineCapabilities) -> None:
        """Take in what is known of an engine that was added just now: its first probe is still to come."""
        for instance in self.known(role):
            if instance.address == address:
                self.registry.learn(instance.id, found)

    def usable(self, role: Role, /) -> Sequence[Instance]:
        """List those that may get a request now; raises NoInstance."""
        return self.registry.usable(role, now=self._clock())

    def without_trials(self, among: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave out the engines that wait for their trial; raises NoInstance: all do."""
        found = [one for one in among if (member := self.registry.get(one.id)) and member.life.state is not _HALF_OPEN]
        if not found:
            raise NoInstance("all engines that are left wait for a trial, and get no request that has failed elsewhere")
        return found

    def check_path(self, path: str, ask: RoutingHints) -> None:
        """Accept a path that an engine may have; raises PathNotServed: each has said that it has no such path."""
        self.missing.check(path, ask, now=self._clock())

    def lacks_path(self, path: str, instance: Instance) -> None:
        """An engine has said that it has no such path."""
        self.later.settle()  # what it has served before
        self.missing.denied(path, instance.id, now=self._clock())

    def has_paths(self, paths: Iterable[str], instance: Instance) -> None:
        """An engine has given good answers for some paths."""
        now = self._clock()
        for path in paths:
            self.missing.served(path, instance.id, now=now)

    def offering(self, path: str, among: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave out the engines that have no such path."""
        return self.missing.offering(path, among, now=self._clock())

    def fitting(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that can read the blocks of a prefill engine, as far as it is known."""
        return self.registry.fitting(prefill, decode)

    def readers(self, lender: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that may read from one that a stream leaves; one that has rested from it is tried.

        Requests try pairs of a prefill and a decode engine alone.
        """
        health, now = self.registry.pairs, self._clock()
        for each in decode if health.has_any else ():
            pair = lender.id, each.id
            if health.has_rested(pair, now=now) and fit(self.registry.facts(lender), self.registry.facts(each)):
                health.tried(pair, now=now)
                return [each]
        return self.registry.fitting(lender, decode)

    def nearest(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave the decode engines of a prefill engine's slice, if slices count and some are: all of them fit it."""
        if self.crossings is None:
            return decode
        return nearest(prefill, decode, lambda instance: self.registry.facts(instance).slice)

    def took_over(self, prefill: Instance, decode: Instance, ask: RoutingHints, /) -> None:
        """Another decode engine has got the leg of one that could not be reached."""
        if self.crossings is not None:
            self.crossings.note(prefill, decode, ask.once_more())

    def shares_loads(self, /) -> bool:
        """Tell whether n answers to one prompt cost any decode engine one load: with our connector, as metrics show.

        Others read the blocks n times, and the prefill engine frees them after the first.
        """
        return all(self.registry.facts(decode).connector == _OURS for decode in self.known(Role.DECODE))

    def pair(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        ask: RoutingHints = ANY,
        /,
        *,
        may_be_alone: bool = False,
        are_all: bool = False,
    ) -> Chosen:
        """Choose two engines, or one where that is fairer and allowed (PairSelector); the choice counts."""
        pair = self._pairs.pair(prefill, decode, ask, may_be_alone=may_be_alone, are_all=are_all)
        for instance in pair:
            if instance is not None:
                self._chosen(instance)
        if self.crossings is not None:
            self.crossings.note(pair[0], pair[1], ask)
        return pair

    def any_pair(self, ask: RoutingHints = ANY, /, *, may_be_alone: bool = False) -> Chosen:
        """Choose among all engines that are usable, as ``pair`` does. Raises as ``usable`` and ``pair`` do."""
        pair = self._pairs.calm(ask, self._clock(), may_be_alone=may_be_alone)
        if pair is None:
            decodes = self.usable(Role.DECODE)
            prefills = self.usable(Role.PREFILL)
            tried = self._try_rested_pair(prefills, decodes, ask)
            if tried is not None:
                return tried
            pair = self.pair(prefills, decodes, ask, may_be_alone=may_be_alone, are_all=True)
        elif self.crossings is not None:
            self.crossings.note(pair[0], pair[1], ask)
        return pair

    def _try_rested_pair(
        self, prefill: Sequence[Instance], decode: Sequence[Instance], ask: RoutingHints
    ) -> Chosen | None:
        """Return a pair that has rested for long enough, if this request may show whether it works."""
        health, now = self.registry.pairs, self._clock()
        pair = self._pairs.rested_pair(prefill, decode, ask, now)
        if pair is None:
            if ask.rank is None and now >= health.next_at:
                health.postpone(health.due(now=now), now=now)
            return None
        health.tried((pair[0].id, pair[1].id), now=now)
        for instance in pair:
            self._chosen(instance)
        if self.crossings is not None:
            self.crossings.note(pair[0], pair[1], ask)
        return pair

    def one(self, decode: Sequence[Instance], ask: RoutingHints = ANY, /) -> Instance:
        """Choose one engine; the choice counts."""
        chosen = self._pairs.one(decode, ask)
        self._chosen(chosen)
        return chosen

    def small(
        self, decode: Sequence[Instance], ask: RoutingHints, least: int, /
    ) -> tuple[SingleEngineReason | None, int]:
        """Say why one engine serves a small prompt alone, and how many bytes of it that one has (PairSelector)."""
        return self._pairs.small(decode, ask, least)

    def any_small(self, ask: RoutingHints, least: int, /) -> tuple[SingleEngineReason | None, int]:
        """Say the same with all decode engines that are usable. Raises as ``usable`` and ``small`` do."""
        alone = self._pairs.calm_alone(ask, self._clock())
        return self._pairs.small(self.usable(_DECODE) if alone is None else alone, ask, least, alone=alone)

    def is_faster_alone(self, decode: Sequence[Instance], ask: RoutingHints, /) -> bool:
        """Tell whether the engine that ``one`` returns next is expected to serve a prompt faster than two engines."""
        try:
            return self._pairs.is_faster_alone(self.usable(Role.PREFILL), decode, ask)
        except NoInstance:  # whoever chooses two engines finds the same, and says what follows
            return False

    def remember(self, decode: Instance, ask: RoutingHints, record: RequestRecord) -> bool:
        """A decode engine has answered, and keeps prompt and answer; False: it has not kept what it was sent for."""
        caches = self.caches
        if caches is None:
            return True
        if record.single_reason in _BY_CACHE and record.cached is not None:
            share, (cached, size) = cached_share(b"".join(record.end)), record.cached
            if share is not None and share * size < _FAR * cached:
                caches.forget(decode, ask, share)
                return False
        caches.answered(decode, ask, record.relayed)
        return True

    def asks_for_ids(self, call: GenerationRequest, ask: RoutingHints) -> bool:
        """Tell whether a prefill engine shall tell the tokens of a prompt."""
        return self.learner is not None and may_tell_ids(call, ask)

    def takes_chat_ids(self, decode: Instance) -> bool:
        """Tell whether a decode engine takes the ids of a chat's prompt, and only where that is exact."""
        member = self.registry.get(decode.id)
        return member is not None and takes_chat_ids(member.facts.version)

    def passes_ids(self, call: GenerationRequest, decode: Instance) -> bool:
        """Tell whether a decode engine can get the ids of a request's prompt in place of its text, or messages."""
        return (call.api is not _CHAT or self.takes_chat_ids(decode)) and may_pass_ids(call.api, call.fields)

    def learn(self, ask: RoutingHints, answer: TokensAnswer | None) -> None:
        """A prefill engine has answered that was asked for the tokens of the prompt; None: it cannot be read."""
        if self.learner is not None:
            self.learner.learn(ask, answer)

    def mode_of(self, prefill: Instance, decode: Instance) -> TransferMode | None:
        """Return how the KV of the next request of two engines moves; None: they do not leave it to the router."""
        member = self.registry.get(prefill.id)
        if member is None or member.facts.mode is not _AUTO:
            return None
        return self.modes.next_way((prefill.id, decode.id), now=self._clock())

    def rehearsal(self) -> PairSelector:
        """Return what would choose now, to be asked without consequences."""
        return self._pairs.copy()

    def prefilled(self, prefill: Instance, request: RequestId, ask: RoutingHints, counted: int | None) -> None:
        """A prefill engine has computed a prompt, and counted its tokens."""
        if self.caches is not None:
            self.caches.arrived(prefill, ask)
        if self.costs is not None:
            self.costs.answered(prefill, request, ask, counted)

    def computes(self, instance: Instance, request: RequestId, ask: RoutingHints) -> None:
        """A decode engine gets a prompt that it computes alone."""
        caches, member = self.caches, self.registry.get(instance.id)
        if caches is not None and member is not None and ask.prompt:
            new = ask.blocks.size - caches.matched(instance, ask, is_there=True)
            member.lone.enter(request, max(0, new), self._clock())

    def computed(self, instance: Instance, request: RequestId) -> None:
        """A decode engine has the first token of a prompt that it computes alone."""
        if (member := self.registry.get(instance.id)) is not None:
            member.lone.leave(request)

    def answered(self, instance: Instance, request: RequestId, _seconds: float, /) -> None:
        """It has a good answer."""
        self.all_answered(instance, (request,))

    def all_answered(self, instance: Instance, requests: Sequence[RequestId], /) -> None:
        """An engine has given some good answers."""
        if (member := self.registry.get(instance.id)) is not None:
            member.life.succeeded(requests, self._clock())
            mode = MODES.get(self._learned.state(instance.id)) if instance.role is _PREFILL else None
            if mode is not None and member.facts.mode not in (mode, _AUTO):
                self.registry.learn(instance.id, EngineCapabilities(mode=mode))

    def completed(self, instance: Instance) -> None:
        """An answer of an engine has come to its end."""
        if (member := self.registry.get(instance.id)) is not None:
            member.life.completed()

    def ended(
        self, instance: Instance, request: RequestId, failure: Failure | None, /, *, was_begun: bool = False
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

    def _chosen(self, instance: Instance) -> None:
        if (member := self.registry.get(instance.id)) is not None:
            member.life.chosen(now=self._clock())

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
            member.lone.leave(request)
            if self._load_changed is not None:
                self._load_changed(instance.id)
            if self.costs is not None:
                member.speed.leave(request, self._clock())
            if member.life.state is _HALF_OPEN:
                self.later.settle()  # that it has served its trial may be among what waits
            member.life.released(request)
