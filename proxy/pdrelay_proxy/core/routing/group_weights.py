"""How much of the traffic each group of compatible engines gets, so that no engine gets much more
than its fair share.

A request needs an engine of each role out of one group. With p and d engines of the roles, a group
with p_g and d_g of them can take min(p_g / p, d_g / d) of all requests before one of its engines
gets more than the mean. While a rollout replaces one role faster than the other, these shares do
not add up to 1. Then every group gets up to ``BOUND`` times its share, and what is left goes to
decode engines that serve alone, if they may.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import fsum, log
from typing import Final

from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup, Grouping

BOUND: Final = 1.4  # times its fair share that an engine gets before decode engines serve alone
# times its fair share that an engine gets (share_bound): more than its revision may get on the mean
EACH: Final = 1.45
# times its part of its group's weight that it gets in any case: there may be no other group
_SPARE: Final = 1.03
_BURST: Final = 4.0  # requests that caches may send to a group beyond its bound
# its multiples, modulo 1, are spread evenly over any number of turns in a row
_GOLDEN: Final = 0.6180339887498949
_HASHES: Final = float(1 << 64)
_LEAST: Final = 1e-9
_MOST_CREDITS: Final = 4096  # groups: there is one for each slice


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A part of the traffic: requests of two of a group's engines, or of one alone."""

    group: CompatibleGroup
    alone: bool
    weight: float  # all weights together are 1
    limit: float  # of the traffic that the group's engines may get where a cache decides


class Shares:
    """The traffic of a whole fleet, or of one model; it is not empty."""

    def __init__(
        self, shares: Sequence[GroupShare], prefills: float = 0.0, decodes: float = 0.0
    ) -> None:
        """``prefills``, ``decodes``: the engines of each role, also those that get nothing."""
        self.all = shares
        self.prefills = prefills
        self.decodes = decodes
        # the sums of the weights so far
        self.upto = list(accumulate([share.weight for share in shares]))
        self.limits = dict[str, float]()  # by group: the limit of its first share
        for share in reversed(shares):
            self.limits[share.group.name] = share.limit
        # Empty: not looked at yet. Only caches ask for them, and to list thousands takes as long as
        # to divide them.
        self._by_engine = dict[InstanceId, GroupShare]()
        self._sides: Sequence[Sequence[Instance]] = ((), ())

    @property
    def by_engine(self) -> Mapping[InstanceId, GroupShare]:
        """The first share that each engine has a part in."""
        if not self._by_engine:
            for share in reversed(self.all):
                for engines in (share.group.decode, () if share.alone else share.group.prefill):
                    self._by_engine.update(
                        dict.fromkeys([instance.id for instance in engines], share)
                    )
        return self._by_engine

    @property
    def prefill(self) -> Sequence[Instance]:
        """The prefill engines of all shares."""
        return self._listed()[0]

    @property
    def decode(self) -> Sequence[Instance]:
        """The decode engines of all shares."""
        return self._listed()[1]

    def _listed(self) -> Sequence[Sequence[Instance]]:
        if not self._sides[1]:
            prefill = dict[InstanceId, Instance]()
            decode = dict[InstanceId, Instance]()
            for share in reversed(self.all):
                decode.update([(instance.id, instance) for instance in share.group.decode])
                if not share.alone:
                    prefill.update([(instance.id, instance) for instance in share.group.prefill])
            self._sides = [*prefill.values()], [*decode.values()]
        return self._sides

    def rates(self) -> "FairRates":
        """Return the part of all requests that each engine may get (share_bound)."""
        return FairRates(self)


class FairRates:
    """The part of all requests that each engine may get: worked out when an engine is asked for."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        # By role: the least that an engine may get, and what its shares give it. Empty: not looked
        # at yet.
        self._sides = list[tuple[float, dict[InstanceId, float]]]()
        self._size = 0  # engines
        self._known = dict[InstanceId, float]()

    def __len__(self) -> int:
        if not self._sides:
            self._work_out()
        return self._size

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(InstanceId(name)) is not None

    def get(self, name: InstanceId, /) -> float | None:
        """Return the part that an engine may get; one that serves both roles gets the parts of
        both.

        None: none.
        """
        rate = self._known.get(name)
        if rate is None:
            if not self._sides:
                self._work_out()
            rates = [
                max(least, _SPARE * parts[name]) for least, parts in self._sides if name in parts
            ]
            if rates:
                rate = self._known[name] = fsum(rates)
        return rate

    def _work_out(self) -> None:
        shares = self._shares.all
        known = self._shares
        decodes = _parts([(share.weight, share.group.decode) for share in shares])
        prefills = _parts(
            [(share.weight, share.group.prefill) for share in shares if not share.alone]
        )
        self._size = len(decodes) + len(prefills)
        if not decodes.keys().isdisjoint(prefills):
            self._size = len(decodes.keys() | prefills.keys())
        both = ((known.decodes, decodes), (known.prefills, prefills))
        self._sides.extend([(EACH / total, parts) for total, parts in both if parts])


def _parts(shares: Sequence[tuple[float, Sequence[Instance]]]) -> dict[InstanceId, float]:
    """Divide weights among engines, some of which may be in several shares."""
    parts = dict[InstanceId, float]()
    for weight, engines in shares:
        part = weight / len(engines)
        found = dict.fromkeys([instance.id for instance in engines], part)
        if not parts.keys().isdisjoint(found):
            for name in parts.keys() & found.keys():
                found[name] = parts[name] + part
        parts.update(found)
    return parts


def shares_of(grouping: Grouping, *, may_be_alone: bool) -> Shares:
    """Divide the traffic; there must be a group with engines of both roles.

    A single engine without a partner is not counted in its role: it is the first or the last one of
    a rollout, and without this rule a fleet of one prefill and one decode engine would leave
    prefill work to its decode engine.
    """
    pairs = grouping.pairs
    prefills = fsum([group.prefill_count for group in pairs]) + _beyond_one(
        len(grouping.unpaired_prefill)
    )
    decodes = sum([len(group.decode) for group in pairs]) + _beyond_one(
        len(grouping.unpaired_decode)
    )
    capacity = [min(group.prefill_count / prefills, len(group.decode) / decodes) for group in pairs]
    stretch = 1 / fsum(capacity)
    if may_be_alone:
        stretch = min(stretch, BOUND)
    found = [
        GroupShare(group, alone=False, weight=least * stretch, limit=least * max(BOUND, stretch))
        for group, least in zip(pairs, capacity, strict=True)
    ]
    left = 1 - fsum(capacity) * stretch
    everyone = (
        fsum([group.prefill_count for group in pairs]) + len(grouping.unpaired_prefill),
        float(sum([len(group.decode) for group in grouping.groups])),
    )
    if left <= _LEAST:
        return Shares(found, *everyone)
    used = {share.group.name: share.weight for share in found}
    rooms = [
        max(0.0, len(group.decode) / decodes - used.get(group.name, 0.0))
        for group in grouping.groups
    ]
    alone = [
        GroupShare(group, alone=True, weight=left * room / fsum(rooms), limit=BOUND * room)
        for group, room in zip(grouping.groups, rooms, strict=True)
        if room > _LEAST
    ]
    return Shares([*found, *alone], *everyone)


def _beyond_one(count: int) -> int:
    return 0 if count == 1 else count


class GroupTurns:
    """Chooses a share for each request; of many in a row, each gets its weight."""

    def __init__(self, turn: int = 0, credit: Mapping[str, float] | None = None) -> None:
        self._turn = turn
        # By group: the requests that its engines may still get because of a cache; None: no cache
        # was asked yet.
        self._credit = None if credit is None else dict(credit)

    def next(self, shares: Shares) -> GroupShare:
        """Return the share whose turn it is."""
        at = bisect_right(shares.upto, self._turn * _GOLDEN % 1.0)
        self._turn += 1
        chosen = shares.all[min(at, len(shares.all) - 1)]
        self._count(shares, chosen)
        return chosen

    def cached(self, shares: Shares, holders: Sequence[InstanceId]) -> GroupShare | None:
        """Return the share of the first of these engines whose group has not reached its limit;
        None: there is none.
        """
        if self._credit is None:
            self._credit = {}
        for name in holders:
            share = shares.by_engine.get(name)
            if share is not None and self._credit.get(share.group.name, _BURST) >= 1:
                self._count(shares, share)
                return share
        return None

    def of_session(self, shares: Shares, session: str) -> GroupShare:
        """Return the share of a session: by weighted rendezvous, so that few sessions move when
        weights change.
        """
        return max(shares.all, key=lambda share: _bid(share, session))

    def others(
        self, shares: Shares, chosen: GroupShare, session: str | None
    ) -> Sequence[GroupShare]:
        """List the other shares, in the order in which they take what the engines of the chosen one
        must not get.
        """
        others = [share for share in shares.all if share is not chosen]
        return (
            others if session is None else sorted(others, key=lambda share: -_bid(share, session))
        )

    def moved(self, chosen: GroupShare, other: GroupShare) -> None:
        """The request that the chosen share was counted for goes to another one."""
        if self._credit is not None and chosen.group.name in self._credit:
            self._credit[chosen.group.name] += 1.0
            self._credit[other.group.name] = self._credit.get(other.group.name, _BURST) - 1.0

    def copy(self) -> "GroupTurns":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return GroupTurns(self._turn, self._credit)

    def _count(self, shares: Shares, chosen: GroupShare) -> None:
        """Let each group have more by its limit, and the chosen one have one request less."""
        credit = self._credit
        if credit is None:
            return
        if len(credit) > _MOST_CREDITS:
            credit.clear()
        for name, limit in shares.limits.items():
            credit[name] = min(_BURST, credit.get(name, _BURST) + limit)
        credit[chosen.group.name] -= 1.0


def _bid(share: GroupShare, session: str) -> float:
    """Bid for a session: the highest bid wins with a probability in proportion to the weight
    (rendezvous hashing).
    """
    key = blake2b(f"{share.group.name}#{share.alone}".encode(), digest_size=16).digest()
    drawn = int.from_bytes(blake2b(session.encode(), key=key, digest_size=8).digest())
    return share.weight / -log((drawn + 0.5) / _HASHES)
