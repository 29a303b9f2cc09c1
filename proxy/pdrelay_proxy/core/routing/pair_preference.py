"""Which of the engines that fit each other had better share requests."""

from collections.abc import Sequence, Set

from pdrelay_proxy.core.model import Instance, InstanceId, RoutingHints
from pdrelay_proxy.core.routing.compatible_groups import CompatibleGroup
from pdrelay_proxy.core.routing.group_weights import Shares


class PairPreference:
    """A feature may have one.

    What it divides is remembered until a fact changes: no request pays for it.

    A class, because a compiled call of a Protocol is slow. A preference overrides what it needs.
    """

    __slots__ = ()

    def divide(self, shares: Shares, /) -> Shares:
        """Divide the traffic of engines that fit once more."""
        return shares

    def left_out(
        self, _group: CompatibleGroup, _served: Set[InstanceId], /
    ) -> Sequence[CompatibleGroup]:
        """List the engines of a group that get no traffic by this, in groups that have a name;
        ``served``: that do.
        """
        return ()

    def nearest(self, _engine: Instance, others: Sequence[Instance], /) -> Sequence[Instance]:
        """Leave those of some engines that are better partners of one; none is: leave all."""
        return others

    def reason(self, _prefill: Instance, _decode: Instance, _hints: RoutingHints, /) -> str | None:
        """Return why two engines that had better not share a request do so; None: they may."""
        return None

    def note(self, prefill: Instance | None, decode: Instance, hints: RoutingHints, /) -> None:
        """A request goes to these engines; None: the decode engine is alone."""
