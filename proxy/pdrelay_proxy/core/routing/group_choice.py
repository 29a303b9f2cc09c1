"""Which of several groups of compatible engines serves a request, and which engines of it.

There are several while revisions are mixed (group_weights), and where a preference has divided the
engines.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet import compatibility
from pdrelay_proxy.core.model import Instance, InstanceId, RoutingHints
from pdrelay_proxy.core.routing.candidates import Among, Fits, Narrowed
from pdrelay_proxy.core.routing.group_weights import FairRates, GroupShare, GroupTurns, Shares
from pdrelay_proxy.core.routing.pairing import Chosen, HolderPolicy, PairPolicy
from pdrelay_proxy.core.routing.share_bound import ShareBound, ShareBounds, without

# Returns those of some prefill engines that the cache of their policy prefers.
PrefillHolders: TypeAlias = Callable[[Among, RoutingHints], Among]
_NOBODY: Final = frozenset[InstanceId]()


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Chooses among what candidates come down to."""

    choice: PairPolicy  # of the engines of a group
    holder: HolderPolicy | None = None  # the policy of decode engines; None: it remembers nothing
    # For prompts of which no decode engine has anything.
    prefill_holders: PrefillHolders | None = None
    turns: GroupTurns = field(default_factory=GroupTurns)
    # How much one engine gets while revisions are mixed; None: the policies see to it themselves.
    bounds: ShareBounds | None = None

    def pair(self, narrowed: Narrowed, hints: RoutingHints, *, may_be_alone: bool) -> Chosen:
        """Choose a group, if there are several, and then its engines."""
        division = narrowed.division
        shares = division.shares_alone if may_be_alone else division.shares
        if shares is None:
            return self.choice.pair(
                narrowed.prefill,
                narrowed.decode,
                hints,
                compatibility.always if narrowed.all_fit else narrowed.fits,
            )
        rates = division.rates.get(may_be_alone)
        if self.bounds is not None and rates is not None:
            return self._pair_within(
                shares, rates, self.bounds.of(hints.model), hints, narrowed.fits
            )
        share = self._share(shares, _NOBODY, hints)
        return self._pair_of(share, share.group.prefill, share.group.decode, hints, narrowed.fits)

    def _pair_within(
        self, shares: Shares, rates: FairRates, bound: ShareBound, hints: RoutingHints, fits: Fits
    ) -> Chosen:
        """Choose likewise among engines that may get more; if a group has none of a role, another
        group serves.
        """
        out = bound.exhausted()
        first = share = self._share(shares, out, hints)
        sides = share.group.prefill, share.group.decode
        if out and share.group.all_fit:
            for each in (first, *self.turns.others(shares, first, hints.session)):
                prefill = without(each.group.prefill, out)
                decode = without(each.group.decode, out)
                if decode and (prefill or each.alone) and each.group.all_fit:
                    share = each
                    sides = (prefill, decode)
                    break
        if share is not first:
            self.turns.moved(first, share)
        chosen = self._pair_of(share, *sides, hints, fits)
        bound.count(rates, chosen)
        return chosen

    def _pair_of(
        self, share: GroupShare, prefill: Among, decode: Among, hints: RoutingHints, fits: Fits
    ) -> Chosen:
        if share.alone:
            return None, self.choice.choose(decode, hints)
        return self.choice.pair(
            prefill, decode, hints, compatibility.always if share.group.all_fit else fits
        )

    def _share(self, shares: Shares, out: Set[InstanceId], hints: RoutingHints) -> GroupShare:
        """Choose a share: that of a session, of an engine that has the prompt in its cache, or the
        next.

        ``out``: engines that are not asked for their caches.
        """
        share = None
        if len(shares.all) == 1:
            return shares.all[0]
        if hints.session is not None:
            return self.turns.of_session(shares, hints.session)
        if hints.prompt and self.holder is not None and (decode := without(shares.decode, out)):
            holders = self.holder.holders(decode, hints)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        if (
            share is None
            and hints.prompt
            and self.prefill_holders is not None
            and (prefill := without(shares.prefill, out))
        ):
            holders = self.prefill_holders(prefill, hints)
            share = self.turns.cached(shares, [instance.id for instance in holders])
        return self.turns.next(shares) if share is None else share

    def within_bound(self, alone: Among, rates: FairRates | None, hints: RoutingHints) -> Among:
        """Leave the engines that may get more, if there are any.

        ``rates``: what each may get, if revisions are mixed.
        """
        if self.bounds is None or rates is None:
            return alone
        return without(alone, self.bounds.of(hints.model).exhausted()) or alone

    def alone(self, among: Among, rates: FairRates | None, hints: RoutingHints) -> Instance:
        """Choose the engine that serves a request, or its decode leg, alone.

        ``rates``: what each may get, if revisions are mixed.
        """
        chosen = self.choice.choose(among, hints)
        if self.bounds is not None and rates is not None:
            self.bounds.of(hints.model).count(rates, (chosen,))
        return chosen

    def copy(self, choice: PairPolicy) -> "GroupChoice":
        """Return one that chooses alike by another choice, and leaves no trace here."""
        return GroupChoice(
            choice,
            self.holder,
            self.prefill_holders,
            self.turns.copy(),
            None if self.bounds is None else self.bounds.copy(),
        )
