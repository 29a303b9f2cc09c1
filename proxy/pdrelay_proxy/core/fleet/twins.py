"""Records of one engine under several addresses: it would get as many shares of the requests."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from pdrelay_proxy.core.fleet.health import SERVING
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.member_table import MemberTable
from pdrelay_proxy.core.model import Instance, InstanceId, Role

# The engine id, when the process started, the rank and the role that an engine was added with.
TwinKey: TypeAlias = tuple[str, str | None, int | None, Role]


def twin_key(member: Member) -> TwinKey | None:
    """Return what two records of one engine have in common, if it is known.

    Ranks behind one address have one engine id. Two processes may have been given one by mistake,
    and are two.
    """
    facts = member.facts
    instance = member.instance
    return (
        None
        if facts.engine_id is None
        else (facts.engine_id, facts.started, instance.rank, instance.pool)
    )


class Twins:
    """Which of the engines are one."""

    __slots__ = ("_counts", "_several", "_table")

    def __init__(self, table: MemberTable) -> None:
        self._table = table
        self._counts = Counter[TwinKey]()
        self._several: set[TwinKey] = set()  # those of them that several members have

    def recount(self, before: TwinKey | None, now: TwinKey | None) -> None:
        """A member has another key, or is new, or gone."""
        if before == now:
            return
        for key, change in ((before, -1), (now, 1)):
            if key is not None:
                self._counts[key] += change
                if self._counts[key] > 1:
                    self._several.add(key)
                else:
                    self._several.discard(key)
                if not self._counts[key]:
                    del self._counts[key]

    def without(self, engines: Sequence[Instance]) -> Sequence[Instance]:
        """Leave the first one of those that are one engine."""
        if not self._several:
            return engines
        kept = list[Instance]()
        seen = set[TwinKey]()
        for instance in engines:
            key = twin_key(self._table.by_id[instance.id])
            if key is None or key not in seen:
                kept.append(instance)
            if key is not None:
                seen.add(key)
        return kept

    def twin_of(self, name: InstanceId) -> InstanceId | None:
        """Return the engine that gets the requests of another one that is the same under another
        address; None: none.

        It is the first one of those that take requests: an engine may have moved to another
        address.
        """
        member = self._table.get(name) if self._several else None
        if member is None:
            return None
        key = twin_key(member)
        if key not in self._several:
            return None
        for role in Role:
            instance = member.as_role(role)
            engines = [
                other for life, other in self._table.serving[role].values() if life.state in SERVING
            ]
            if instance is not None and instance in engines:
                same = [other for other in engines if twin_key(self._table.by_id[other.id]) == key]
                if same[0].id != name:
                    return same[0].id
        return None
