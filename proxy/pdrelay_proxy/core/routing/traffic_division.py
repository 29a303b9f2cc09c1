"""How the traffic for a model is divided among groups of compatible engines, if at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import agree, without_slice
from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.core.routing.compatible_groups import Facts, Grouping
from pdrelay_proxy.core.routing.group_weights import FairRates, Shares, shares_of
from pdrelay_proxy.core.routing.pair_preference import PairPreference

_UNBOUND: Final[Mapping[bool, FairRates]] = {}


@dataclass(frozen=True, slots=True)
class TrafficDivision:
    """The shares of groups, and those of engines. It holds while nothing changes."""

    shares: Shares | None  # None: there is one group of all engines, and nothing to divide
    shares_alone: Shares | None  # the same where decode engines may serve alone
    # By whether decode engines may serve alone: the part of the requests that each engine may get;
    # empty: any.
    rates: Mapping[bool, FairRates]


def divide_traffic(
    grouping: Grouping,
    prefill: Sequence[Instance],
    decode: Sequence[Instance],
    facts: Facts,
    preference: PairPreference | None,
    *,
    is_bound: bool,
) -> TrafficDivision:
    """Divide the traffic among groups, of which one has engines of both roles.

    ``prefill``, ``decode``: the engines that have a partner. ``is_bound``: say how much each engine
    may get while revisions are mixed.
    """
    alone = _shares(grouping, preference, may_be_alone=True)
    # Where nothing is served alone although it may be, nothing changes if it may not.
    is_some_alone = True in [share.alone for share in alone.all]
    shares = _shares(grouping, preference, may_be_alone=False) if is_some_alone else alone
    if is_bound and _is_mixed(grouping, facts):
        rates = alone.rates()
        return TrafficDivision(
            shares, alone, {True: rates, False: shares.rates() if is_some_alone else rates}
        )
    return TrafficDivision(
        None if _is_whole(shares, prefill, decode) else shares,
        None if _is_whole(alone, prefill, decode) else alone,
        _UNBOUND,
    )


def _shares(grouping: Grouping, preference: PairPreference | None, *, may_be_alone: bool) -> Shares:
    shares = shares_of(grouping, may_be_alone=may_be_alone)
    return shares if preference is None else preference.divide(shares)


def _is_mixed(grouping: Grouping, facts: Facts) -> bool:
    """Tell whether engines differ in more than their slice, and not as a pair that rests."""
    prefill = [*grouping.unpaired_prefill, *(group.prefill[0] for group in grouping.pairs)]
    sides = prefill, [group.decode[0] for group in grouping.groups]
    kinds = [{without_slice(facts(engine)) for engine in side} for side in sides]
    return not all(agree(one, other) for one, other in product(*kinds))


def _is_whole(shares: Shares, prefill: Sequence[Instance], decode: Sequence[Instance]) -> bool:
    """Tell whether there is one share, of all these engines: a preference may leave some out."""
    if len(shares.all) > 1:
        return False
    group = shares.all[0].group
    return len(group.prefill) == len(prefill) and len(group.decode) == len(decode)
