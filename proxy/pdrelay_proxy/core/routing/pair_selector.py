"""Which engines may serve a request: looked at once, until a fact changes."""

from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import (
    ANY,
    Instance,
    InstanceId,
    Role,
    RoutingHints,
    SingleEngineReason,
)
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.core.routing.candidates import Among, Candidates, Narrowed
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.group_weights import FairRates
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.routing.pairing import Chosen, WeighingPolicy
from pdrelay_proxy.core.routing.serving_engines import serving
from pdrelay_proxy.core.routing.share_bound import make_room
from pdrelay_proxy.errors import NoInstance

# of the fleet, of which what they come down to is remembered: retries leave engines out
_MOST_PARTS: Final = 4


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What all usable engines come down to for a model, while nothing changes."""

    version: int  # the changes counted so far
    until: float  # when the passing of time may change it
    narrowed: Narrowed
    tells_alone: bool  # also which engines may serve alone


class _CacheHolders:
    """The engines of which one serves a prompt alone, as was found a moment ago."""

    __slots__ = ("_engines", "_prompt")

    def __init__(self) -> None:
        self._engines: Among = ()
        self._prompt: bytes | memoryview | None = None

    def remember(self, engines: Among, hints: RoutingHints) -> None:
        """Remember them until they are asked for."""
        self._engines = engines
        self._prompt = hints.prompt

    def pop(self, among: Among, hints: RoutingHints) -> Among:
        """Return those of some engines, once, if it was this prompt, or a repeated request."""
        if self._prompt is not hints.prompt:
            return ()
        engines = self._engines
        self._engines = ()
        self._prompt = None
        return [instance for instance in engines if instance in among]


@dataclass(frozen=True, slots=True)
class PairSelector:
    """Narrows engines down to those that serve a model and fit; a choice chooses of them."""

    registry: Registry
    groups: GroupChoice
    bound: AloneBound | None = None  # for what decode engines compute alone; None: for nothing
    # the choice, if it also decides whether a decode engine serves alone
    weighing: WeighingPolicy | None = None
    # a decode engine serves short prompts alone, though it has nothing of them
    short_alone: bool = True
    preference: PairPreference | None = None  # among engines that fit; None: any will do
    pair_history: PairHistory = field(default_factory=PairHistory)
    # all usable engines, as they were last
    _whole: list[Candidates] = field(default_factory=list[Candidates])
    # some of them, the latest last
    _parts: list[Candidates] = field(default_factory=list[Candidates])
    _holders: _CacheHolders = field(default_factory=_CacheHolders)
    # by model
    _snapshots: dict[str | None, _Snapshot] = field(default_factory=dict[str | None, _Snapshot])

    def quick_pair(
        self, hints: RoutingHints, now: float = 0.0, *, may_be_alone: bool = False
    ) -> Chosen | None:
        """Return what ``pair`` would with all usable engines, if nothing has changed; None: only
        ``pair`` can tell.
        """
        snapshot = self._snapshot(hints, now)
        if snapshot is None:
            return None
        return self.groups.pair(snapshot.narrowed, hints, may_be_alone=may_be_alone)

    def quick_alone(self, hints: RoutingHints, now: float) -> Among | None:
        """Return the engines of which one may serve a request alone; None: nothing is remembered,
        as for ``quick_pair``.
        """
        snapshot = self._snapshot(hints, now)
        return None if snapshot is None or not snapshot.tells_alone else snapshot.narrowed.alone

    def _snapshot(self, hints: RoutingHints, now: float) -> _Snapshot | None:
        snapshot = self._snapshots.get(hints.model)
        if snapshot is None or hints.rank is not None:
            return None
        is_old = snapshot.version != self.registry.changes.count or now >= snapshot.until
        return None if is_old else snapshot

    def pair(
        self,
        prefill: Among,
        decode: Among,
        hints: RoutingHints = ANY,
        /,
        *,
        may_be_alone: bool = False,
        are_all: bool = False,
    ) -> Chosen:
        """Return two engines that can share it, or one where that is fairer (``may_be_alone``).

        ``are_all``: these are all usable engines, so that what is found holds for the next requests
        (``quick_pair``). Raises UnknownModel, BadRequest (no such rank), or NoInstance.
        """
        among = self._candidates(self._whole if are_all else self._parts, prefill, decode)
        waiting = among.waiting(hints)
        if waiting:
            tried = self._pair_on_trial(among, waiting, hints, may_be_alone=may_be_alone)
            if tried is not None:
                return tried
            well = self._without(among, waiting)
            narrowed = well.narrowed(hints, may_be_alone=may_be_alone)
        else:
            narrowed = among.narrowed(hints, may_be_alone=may_be_alone)
        if are_all and hints.rank is None:
            if hints.model not in self._snapshots:
                make_room(self._snapshots, self.registry)
            until = min(self.registry.steady_until, self.pair_history.trial_at)
            # one of these gets any request
            tells_alone = not waiting or not [d for d in decode if d.id in waiting]
            self._snapshots[hints.model] = _Snapshot(among.version, until, narrowed, tells_alone)
        return self.groups.pair(narrowed, hints, may_be_alone=may_be_alone)

    def _candidates(self, known: list[Candidates], prefill: Among, decode: Among) -> Candidates:
        """Return these engines with what they come down to, as far as it is known."""
        for each in known:
            if each.is_for(prefill, decode):
                return each
        most = 1 if known is self._whole else _MOST_PARTS
        known[:] = [each for each in known if not each.is_old]
        if len(known) >= most:
            del known[0]
        is_bound = self.groups.bounds is not None
        candidates = Candidates(
            self.registry, prefill, decode, is_bound=is_bound, preference=self.preference
        )
        known.append(candidates)
        return candidates

    def choose(self, decode: Among, hints: RoutingHints = ANY, /) -> Instance:
        """Return the engine of a request, or of its decode leg, alone; raises as ``pair``."""
        rates = self._rates_alone(hints)
        among = self.groups.within_bound(self._alone(decode, hints), rates, hints)
        return self.groups.alone(self._holders.pop(among, hints) or among, rates, hints)

    def small(
        self, decode: Among, hints: RoutingHints, least: int, *, alone: Among | None = None
    ) -> tuple[SingleEngineReason | None, int]:
        """Say why the engine that ``choose`` returns next serves a prompt alone, and how many bytes
        of it that engine has.

        It does if it lacks fewer than ``least`` bytes, those of others included that it computes
        alone now. ``alone``: those that may serve it alone, if they are known. Raises what ``pair``
        raises.
        """
        if self.short_alone and len(hints.prompt) < least:
            return SingleEngineReason.SHORT, 0
        holder = self.groups.holder
        if not least or holder is None or self.bound is None:
            return None, 0
        if alone is None:
            alone = self._alone(decode, hints)
        among = self.groups.within_bound(alone, self._rates_alone(hints), hints)
        holding = holder.holding(among, hints, least, self.bound)
        if not self.short_alone and not holding.cached:
            return None, 0  # all of a short prompt is new
        self.bound.count(holding)
        if not holding.engines:
            return None, holding.cached
        self._holders.remember(holding.engines, hints)
        return SingleEngineReason.CACHED, holding.cached

    def is_faster_alone(self, prefill: Among, decode: Among, hints: RoutingHints) -> bool:
        """Tell whether the engine that ``choose`` returns next is faster than any pair; raises what
        ``pair`` raises.
        """
        if self.weighing is None:
            return False
        prefill = serving(self.registry, Role.PREFILL, prefill, hints)
        rates = self._rates_alone(hints)
        # the engines that ``choose`` looks at
        alone = self.groups.within_bound(self._alone(decode, hints), rates, hints)
        return self.weighing.alone(prefill, alone, hints)

    def take_expected(self, hints: RoutingHints) -> ExpectedTime | None:
        """Return what was expected of the latest choice, once, if it was this request's; None:
        nothing is weighed.
        """
        return None if self.weighing is None else self.weighing.take_expected(hints)

    def copy(self) -> "PairSelector":
        """Return one that chooses alike, and whose choices leave no trace here."""
        weighing = None if self.weighing is None else self.weighing.copy()
        return PairSelector(
            self.registry,
            self.groups.copy(self.groups.choice.copy() if weighing is None else weighing),
            None if self.bound is None else self.bound.copy(),
            weighing,
            self.short_alone,
            self.preference,
            self.pair_history,
        )

    def _alone(self, decode: Among, hints: RoutingHints) -> Among:
        """List the engines of which one may serve alone; one that waits for its trial does."""
        trying, well = self._sorted(serving(self.registry, decode[0].role, decode, hints))
        return trying[:1] if trying and not (hints.again and well) else well

    def _rates_alone(self, hints: RoutingHints) -> FairRates | None:
        """Return what each engine may get where one may serve alone, as ``pair`` has found it;
        None: any part.
        """
        snapshot = self._snapshots.get(hints.model)
        if snapshot is None or snapshot.version != self.registry.changes.count:
            return None
        return snapshot.narrowed.division.rates.get(True)

    def _pair_on_trial(
        self,
        among: Candidates,
        waiting: frozenset[InstanceId],
        hints: RoutingHints,
        *,
        may_be_alone: bool,
    ) -> Chosen | None:
        """If an engine waits for its trial, this request is it, with a partner that is well if
        there is one.

        A request that has failed before is on its last chances, and goes to engines that are well
        if there are any. None: those that wait have no partner.
        """
        if hints.again:
            try:  # rests of pairs are respected: there may be another engine
                narrowed = self._without(among, waiting).narrowed(hints, may_be_alone=True)
            except NoInstance:
                pass
            else:
                return self.groups.pair(narrowed, hints, may_be_alone=may_be_alone)
        narrowed = among.narrowed(hints, may_be_alone=may_be_alone)
        prefill = narrowed.prefill
        decode = narrowed.decode
        fits = narrowed.fits
        trying_p = [p for p in prefill if p.id in waiting]
        trying_d = [d for d in decode if d.id in waiting]
        if trying_p:
            prefill = trying_p[:1]
            fitting = [d for d in decode if d.id not in waiting and fits(prefill[0], d)]
            decode = self._near(prefill[0], fitting or [d for d in decode if fits(prefill[0], d)])
        elif trying_d:
            decode = trying_d[:1]
            prefill = self._near(decode[0], [p for p in prefill if fits(p, decode[0])])
        else:
            return None
        return self.groups.choice.pair(prefill, decode, hints, compatibility.always)

    def _without(self, among: Candidates, waiting: frozenset[InstanceId]) -> Candidates:
        """Leave the engines that do not wait for their trial."""
        sides = [
            [one for one in side if one.id not in waiting] for side in (among.prefill, among.decode)
        ]
        return self._candidates(self._parts, *sides)

    def _near(self, engine: Instance, others: Among) -> Among:
        """Leave those that had better be its partner."""
        return others if self.preference is None else self.preference.nearest(engine, others)

    def _sorted(self, among: Among) -> tuple[Among, Among]:
        """Tell those that wait for their trial from those that are well."""
        trying = [
            instance
            for instance in among
            if (member := self.registry.get(instance.id)) is not None
            and member.life.state is HealthState.HALF_OPEN
        ]
        return trying, [
            instance for instance in among if instance not in trying
        ] if trying else among
