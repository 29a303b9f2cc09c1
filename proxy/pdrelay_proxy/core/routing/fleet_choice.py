"""The choices that one can make among the engines as they are now, and what each choice leaves
behind.
"""

from collections.abc import Callable, Sequence
from typing import Final

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.missing_paths import MissingPaths
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import ANY, Instance, Role, RoutingHints, SingleEngineReason
from pdrelay_proxy.core.protocol.push import EngineMode, TransferMode
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import Chosen
from pdrelay_proxy.errors import NoInstance

_OURS: Final = "pdrelay"  # an engine's metrics show which connector it has
_AUTO: Final = EngineMode.AUTO
_HALF_OPEN: Final = HealthState.HALF_OPEN
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


class FleetChoice:
    """Chooses among the engines that a registry holds.

    Requests choose from the LiveFleet, where each choice counts; ``rehearsal`` returns one in which
    none does.
    """

    def __init__(
        self,
        registry: Registry,
        pairs: PairSelector,
        missing: MissingPaths,
        clock: Callable[[], float],
        *,
        fixed_mode: TransferMode | None,
        remembers: bool,
        counts: bool,
    ) -> None:
        """``fixed_mode``: how KV moves between engines that can pull and push; None: as the history
        of each pair says.

        ``remembers``: the decode policy asks what engines have cached. ``counts``: a choice is made
        for a request that follows.
        """
        self.registry = registry
        self.pairs = pairs
        self.missing = missing
        self._fixed_mode = fixed_mode
        self.remembers = remembers
        # Whether the policy knows what engines take for a request, and so whether one alone is
        # faster than two.
        self.weighs = pairs.weighing is not None
        self.preference = pairs.preference
        self.pair_history = pairs.pair_history
        self._noted = pairs.preference if counts else None  # what hears of each pair
        self._counts = counts
        self._clock = clock  # seconds; only differences count

    def rehearsal(self) -> "FleetChoice":
        """Return one that chooses as this one would now, and leaves no trace."""
        return FleetChoice(
            self.registry,
            self.pairs.copy(),
            self.missing,
            self._clock,
            fixed_mode=self._fixed_mode,
            remembers=self.remembers,
            counts=False,
        )

    # ---- which engines there are

    def with_files(
        self, engines: Sequence[Instance], model: str | None, files: str | None, /
    ) -> Sequence[Instance]:
        """Leave out the engines that are known to serve the model from other files: a stream that
        others have begun would go on with other weights.
        """
        if files is None:
            return engines
        facts = self.registry.facts
        return [engine for engine in engines if facts(engine).files_of(model) in (None, files)]

    def known(self, role: Role, /) -> Sequence[Instance]:
        """List all engines of a role."""
        return self.registry.known(role)

    def usable(self, role: Role, /) -> Sequence[Instance]:
        """List those that may get a request now; raises NoInstance."""
        return self.registry.usable(role, now=self._clock())

    def without_trials(self, among: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave out the engines that wait for their trial; raises NoInstance: all do."""
        others = [
            instance
            for instance in among
            if (member := self.registry.get(instance.id)) and member.life.state is not _HALF_OPEN
        ]
        if not others:
            raise NoInstance(
                "all engines that are left wait for a trial, and get no request that has failed "
                "elsewhere"
            )
        return others

    def check_path(self, path: str, hints: RoutingHints) -> None:
        """Accept a path that an engine may have; raises PathNotServed: all have denied it."""
        self.missing.check(path, hints, now=self._clock())

    def offering(self, path: str, among: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave out the engines that have no such path."""
        return self.missing.offering(path, among, now=self._clock())

    def shares_loads(self, /) -> bool:
        """Tell whether n answers to one prompt cost any decode engine one load: with our connector,
        as metrics show.

        Others read the blocks n times, and the prefill engine frees them after the first.
        """
        return all(self.registry.facts(decode).connector == _OURS for decode in self.known(_DECODE))

    # ---- one engine or two

    def any_small(
        self, hints: RoutingHints, least: int, /
    ) -> tuple[SingleEngineReason | None, int]:
        """Say why one of all usable decode engines serves a small prompt alone, and how many bytes
        of it that one has.

        Raises as ``usable`` and ``PairSelector.small`` do.
        """
        alone = self.pairs.quick_alone(hints, self._clock())
        return self.pairs.small(
            self.usable(_DECODE) if alone is None else alone, hints, least, alone=alone
        )

    def is_faster_alone(self, decode: Sequence[Instance], hints: RoutingHints, /) -> bool:
        """Tell whether the engine that ``choose`` returns next is expected to serve a prompt faster
        than two engines.
        """
        try:
            return self.pairs.is_faster_alone(self.usable(_PREFILL), decode, hints)
        except NoInstance:  # whoever chooses two engines finds the same, and says what follows
            return False

    # ---- which engines

    def choose(self, decode: Sequence[Instance], hints: RoutingHints = ANY, /) -> Instance:
        """Choose one engine."""
        chosen = self.pairs.choose(decode, hints)
        self._chosen(chosen)
        return chosen

    def pair(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        hints: RoutingHints = ANY,
        /,
        *,
        may_be_alone: bool = False,
        are_all: bool = False,
    ) -> Chosen:
        """Choose two engines, or one where that is fairer and allowed (PairSelector)."""
        pair = self.pairs.pair(prefill, decode, hints, may_be_alone=may_be_alone, are_all=are_all)
        return self._taken(pair, hints)

    def any_pair(self, hints: RoutingHints = ANY, /, *, may_be_alone: bool = False) -> Chosen:
        """Choose among all engines that are usable, as ``pair`` does.

        Raises as ``usable`` and ``pair`` do.
        """
        pair = self.pairs.quick_pair(hints, self._clock(), may_be_alone=may_be_alone)
        if pair is not None:
            if self._noted is not None:
                self._noted.note(pair[0], pair[1], hints)
            return pair
        decodes = self.usable(_DECODE)
        prefills = self.usable(_PREFILL)
        tried = self.pair_history.pair_to_try(
            prefills, decodes, hints, now=self._clock(), counts=self._counts
        )
        if tried is not None:
            return self._taken(tried, hints)
        return self.pair(prefills, decodes, hints, may_be_alone=may_be_alone, are_all=True)

    def _taken(self, pair: Chosen, hints: RoutingHints) -> Chosen:
        for instance in pair:
            if instance is not None:
                self._chosen(instance)
        if self._noted is not None:
            self._noted.note(pair[0], pair[1], hints)
        return pair

    def _chosen(self, instance: Instance) -> None:
        if self._counts and (member := self.registry.get(instance.id)) is not None:
            member.life.chosen(now=self._clock())

    def mode_of(self, prefill: Instance, decode: Instance) -> TransferMode | None:
        """Return how the KV of the next request of two engines moves; None: they do not leave it to
        the router.
        """
        member = self.registry.get(prefill.id)
        if member is None or member.facts.mode is not _AUTO:
            return None
        if self._fixed_mode is not None:
            return self._fixed_mode
        return self.pair_history.mode(
            (prefill.id, decode.id), now=self._clock(), counts=self._counts
        )
