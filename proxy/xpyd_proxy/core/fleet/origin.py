"""Who names an engine, and what it names."""

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import Role


class EngineSource(StrEnum):
    """Who says that there is an engine; of several that say so, the first one is named."""

    STATIC = auto()  # command line, configuration file
    PODS = auto()
    STORE = auto()  # /instances/add, on any router of the same store


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What makes two engines the same."""

    role: Role
    authority: str  # host:port


@dataclass(frozen=True, slots=True)
class Wanted:
    """One engine that a source names."""

    role: Role
    target: Target
    identity: str = ""  # changes when another engine takes the address (a pod's uid); empty: not known
    leaves: bool = False  # it gets nothing new, and what it has goes on

    @property
    def key(self) -> Key:
        """Where it is."""
        return Key(self.role, self.target.address.authority)


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an engine is in the registry."""

    source: EngineSource = EngineSource.STATIC
    generation: int = 0  # the source's, when it first said this of the engine
    wanted: Wanted | None = None  # as it was carried out last; None: discovery has nothing to do with it


BY_HAND: Final = Origin()
