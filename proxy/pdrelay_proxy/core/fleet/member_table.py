"""The engines, each in one record: by id, by the roles they serve, and by their places."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import ChangeCount, EngineHealth
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.target import Key
from pdrelay_proxy.core.model import EngineRole, Instance, InstanceId, Role
from pdrelay_proxy.errors import AlreadyKnown, UnknownInstance


class MemberTable:
    """What the parts of a registry share; only they change it."""

    __slots__ = ("_added", "_at", "by_id", "changes", "get", "lineup", "serving")

    def __init__(self) -> None:
        self.by_id: Final = dict[InstanceId, Member]()  # in the order they were added
        # Those that serve a role, as they do: in the order of the members.
        self.serving: Final[dict[Role, dict[InstanceId, tuple[EngineHealth, Instance]]]] = {
            role: {} for role in Role
        }
        # what is known of an engine; None if it was removed meanwhile
        self.get: Final = self.by_id.get
        # Their ids by the role they were added with, host and port; none is empty.
        self._at: dict[tuple[Role, str, int], set[InstanceId]] = {}
        self._added: dict[Role, int] = dict.fromkeys(Role, 0)
        self.changes: Final = ChangeCount()
        # of what decides which engines there should be: not of their health
        self.lineup: Final = ChangeCount()

    def new_id(self, role: Role) -> InstanceId:
        """Return an id that no engine has had."""
        name = InstanceId(f"{role}-{self._added[role]}")
        self._added[role] += 1
        return name

    def add(self, member: Member) -> None:
        """Take in a new engine, which serves one role."""
        instance = member.instance
        self.by_id[instance.id] = member
        self.serving[instance.role][instance.id] = member.life, instance
        self._at.setdefault(_place(instance), set()).add(instance.id)
        self.changes.count += 1
        self.lineup.count += 1

    def remove(self, member: Member) -> None:
        """Forget an engine."""
        name = member.instance.id
        del self.by_id[name]
        for serving in self.serving.values():
            serving.pop(name, None)
        place = _place(member.instance)
        self._at[place].discard(name)
        if not self._at[place]:
            del self._at[place]
        self.lineup.count += 1

    def serve(self, member: Member, role: EngineRole) -> None:
        """Have an engine serve this and nothing else; among others it is as old as it was."""
        member.serve(role)
        for leg_role in Role:
            self.serving[leg_role] = {
                instance.id: (other.life, instance)
                for other in self.by_id.values()
                if (instance := other.as_role(leg_role)) is not None
            }
        self.changes.count += 1

    def member(self, name: InstanceId) -> Member:
        """Return what is known of an engine. Raises UnknownInstance: there is none of this id."""
        if (member := self.get(name)) is None:
            raise UnknownInstance(
                f"there is no instance {name!r}: `pdrelay instances list` shows those there are"
            )
        return member

    def at(self, address: Address) -> Iterator[Member]:
        """Yield the engines at a host and port, in whatever role they were added."""
        for role in Role:
            for name in self._at.get((role, address.host, address.port), ()):
                yield self.by_id[name]

    def at_keys(self, places: Iterable[Key]) -> Sequence[Member]:
        """List the engines of some places, also those that retire."""
        wanted = [(key, Address.parse(key.authority)) for key in places]
        return [
            self.by_id[name]
            for key, address in wanted
            for name in sorted(self._at.get((key.role, address.host, address.port), ()))
            if self.by_id[name].instance.address.authority == key.authority
        ]

    def others(self, member: Member, role: Role) -> Sequence[Member]:
        """List the other engines of a role that may serve a model of this one."""
        own = member.facts.models
        return [
            other
            for other in self.by_id.values()
            if other is not member
            and other.role.serves(role)
            and (own is None or other.facts.models is None or own & other.facts.models)
        ]

    def check_new(self, role: Role, address: Address, rank: int | None) -> None:
        """Raise AlreadyKnown if an engine at an address has this role, or turns to it."""
        for member in self.at(address):
            overlaps = rank is None or member.instance.rank in (None, rank)
            if (
                overlaps
                and not member.retires
                and (member.instance.pool is role or member.serves_or_will(role))
            ):
                raise AlreadyKnown(f"{address.authority} is already known as {member.instance.id}")


def _place(instance: Instance) -> tuple[Role, str, int]:
    return instance.pool, instance.address.host, instance.address.port
