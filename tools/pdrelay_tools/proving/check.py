"""What a check is: its name, what it needs, how long it takes, and what it may find."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.core.finding import Finding
from pdrelay_tools.proving.peers import Deed


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check saw.

    ``idle_s``: within how many seconds all blocks must be back, if not within the usual time.
    """

    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    idle_s: float | None = None


CheckRun: TypeAlias = Callable[[Bench], Awaitable[Seen]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    group: str
    about: str  # in a sentence, for people who read the report
    run: CheckRun
    seconds: float = 20.0  # that it usually takes: it does not begin with less
    # what must be possible with engines, by role
    deeds: tuple[tuple[str, Deed], ...] = field(default=())
    is_direct: bool = False  # it needs the engines themselves
    needs_reference: bool = False
