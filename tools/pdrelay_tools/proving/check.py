"""A check: its name, its needs, how long it takes, and its result."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.core.finding import Finding
from pdrelay_tools.proving.peers import Deed


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    ``idle_s``: seconds until all blocks must be free; None: the usual bound.
    """

    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    idle_s: float | None = None


CheckRun: TypeAlias = Callable[[Bench], Awaitable[CheckResult]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    group: str
    about: str  # in a sentence, for people who read the report
    run: CheckRun
    seconds: float = 20.0  # usual duration: it does not begin with less time left
    # what it does to engines, by role
    deeds: tuple[tuple[str, Deed], ...] = field(default=())
    is_direct: bool = False  # it needs the engines themselves
    needs_reference: bool = False
