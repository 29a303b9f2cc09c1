"""Which engine is meant: its address, after ``#`` what it is beyond that, and who names it."""

import re
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final, Self

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.errors import AddressError

# what Kubernetes takes for a label
REVISION: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_OPTIONS: Final = re.compile(
    r"(?:dp=(?P<dp>[1-9][0-9]{0,2})(?:&|$))?(?:mode=(?P<mode>pull|push|auto)(?:&|$))?"
    rf"(?:revision=(?P<revision>{REVISION.pattern})(?:&|$))?(?:slice=(?P<slice>{REVISION.pattern}))?"
)


@dataclass(frozen=True, slots=True)
class Target:
    """An engine, such as ``host:8100``, ``host:8100#dp=4`` or ``host:8100#dp=4&mode=push``."""

    address: Address
    # the data-parallel ranks behind the address, each an instance of its own
    ranks: tuple[int | None, ...] = (None,)
    mode: EngineMode | None = None  # who moves the KV cache; None: it shows
    # of its deployment: two revisions never share a request; None: fits all
    revision: str | None = None
    slice: str | None = None  # its zone, rack or NVLink domain: its partners may have to be of it

    @property
    def text(self) -> str:
        """What ``parse`` reads as this target."""
        dp = "" if self.ranks == (None,) else f"dp={len(self.ranks)}"
        mode = "" if self.mode is None else f"mode={self.mode}"
        revision = "" if self.revision is None else f"revision={self.revision}"
        part = "" if self.slice is None else f"slice={self.slice}"
        options = "&".join(filter(None, (dp, mode, revision, part)))
        return f"{self.address.url}#{options}" if options else self.address.url

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a target; raises BadPort (a number outside 1..65535), else AddressError."""
        address, mark, options = text.partition("#")
        match = _OPTIONS.fullmatch(options)
        if match is None or (mark and not options) or options.endswith("&"):
            raise AddressError(
                f"{text!r} ends in #{options}: write #dp=N (1 to 999), #mode=pull (or push, auto), "
                f"#revision=NAME, "
                "#slice=NAME or several of them in this order, with & between them"
            )
        ranks = tuple(range(int(match["dp"]))) if match["dp"] else (None,)
        mode = EngineMode(match["mode"]) if match["mode"] else None
        return cls(Address.parse(address), ranks, mode, match["revision"], match["slice"])


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
    # changes when another engine takes the address (a pod's uid); empty: not known
    identity: str = ""
    leaves: bool = False  # it gets nothing new, and what it has goes on
    moves: bool = False  # while it leaves, its streams go on at other engines
    # it gets legs of both roles until it turns to one; ``role`` is its pool
    serves_both: bool = False
    added: str = ""  # by hand: another when it is removed and added anew; empty: not known

    @property
    def serves(self) -> EngineRole:
        """What it serves until it turns."""
        return EngineRole.BOTH if self.serves_both else EngineRole(self.role.value)

    @property
    def key(self) -> Key:
        """Where it is."""
        return Key(self.role, self.target.address.authority)


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an engine is in the registry."""

    source: EngineSource = EngineSource.STATIC
    generation: int = 0  # the source's, when it first said this of the engine
    # as it was carried out last; None: discovery has nothing to do with it
    wanted: Wanted | None = None


BY_HAND: Final = Origin()
