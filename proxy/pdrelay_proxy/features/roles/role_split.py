"""How a number of engines is divided between two roles. Pure arithmetic.

A role lacks an engine where more than the target utilisation of its engines is busy. An engine
turns to it if the role that gives it would, without it, still be less pressed than the one that
lacks: by a margin, so noise up to that margin in both numbers cannot turn an engine there and back.
A fleet that is too small for both roles is left as it is.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from pdrelay_proxy.core.model import Role

MARGIN: Final = 1.15
# pressure of a role from which on it gives no engine, whatever the other one lacks
GIVES: Final = 1.2
MOST_WANTED: Final = 10_000  # engines of a role; as planning/sizing.py
OTHER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Split:
    """Engines of both roles."""

    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        """Return the engines of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def turned(self, to: Role) -> "Split":
        """Return the engines after one has turned."""
        more = 1 if to is Role.PREFILL else -1
        return Split(self.prefill + more, self.decode - more)


@dataclass(frozen=True, slots=True)
class Busy:
    """Engines of each role that the traffic keeps busy all the time, and the share that may be."""

    prefill: float
    decode: float
    utilisation: float

    def of(self, role: Role) -> float:
        """Return those of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def pressure(self, role: Role, split: Split) -> float:
        """Return how many times as many engines a role needs as it has: above 1 it lacks some."""
        engines = split.of(role)
        return self.of(role) / (self.utilisation * engines) if engines else float("inf")


def wanted(busy: Busy, least: Split) -> Split:
    """Return the engines that each role needs, as ``pdrelay plan`` counts them."""
    prefill, decode = (
        min(MOST_WANTED, max(least.of(role), ceil(busy.of(role) / busy.utilisation - 1e-9)))
        for role in Role
    )
    return Split(prefill, decode)


def lacking(busy: Busy, split: Split) -> Role | None:
    """Return the role to which an engine should turn; None: neither lacks one, or the other cannot
    spare one.
    """
    for role in Role:
        other = OTHER[role]
        if not split.of(other):
            continue
        pressure = busy.pressure(role, split)
        after = busy.pressure(other, split.turned(role))
        if pressure > 1.0 and after <= GIVES and pressure > MARGIN * after:
            return role
    return None


def is_short(busy: Busy, split: Split) -> bool:
    """Tell whether a role lacks an engine."""
    return any(busy.pressure(role, split) > 1.0 for role in Role)
