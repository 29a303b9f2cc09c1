"""How many engines each of two roles should have. Pure arithmetic.

A role lacks an engine if its engines are busier than the target utilisation. An engine of the other
role changes to it if that role, without the engine, would still have less pressure: by a margin, so
that noise cannot move an engine there and back. A fleet that is too small for both roles is left as
it is.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from pdrelay_proxy.core.model import Role

MARGIN: Final = 1.15
# above this pressure a role gives no engine away
GIVES: Final = 1.2
MOST_WANTED: Final = 10_000  # engines of a role; as planning/sizing.py
OTHER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of engines by role."""

    prefill: int
    decode: int

    def for_role(self, role: Role) -> int:
        """Return the number of engines of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def after_change(self, to: Role) -> "Split":
        """Return the numbers after one engine has changed its role."""
        more = 1 if to is Role.PREFILL else -1
        return Split(self.prefill + more, self.decode - more)


@dataclass(frozen=True, slots=True)
class Busy:
    """How many engines of each role the traffic keeps busy, and the target utilisation."""

    prefill: float
    decode: float
    utilisation: float

    def for_role(self, role: Role) -> float:
        """Return the busy engines of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def pressure(self, role: Role, split: Split) -> float:
        """Return the engines that a role needs over those that it has: above 1 it lacks some."""
        engines = split.for_role(role)
        return self.for_role(role) / (self.utilisation * engines) if engines else float("inf")


def needed_split(busy: Busy, least: Split) -> Split:
    """Return how many engines each role needs, by the formula of ``pdrelay plan``."""
    prefill, decode = (
        min(
            MOST_WANTED,
            max(least.for_role(role), ceil(busy.for_role(role) / busy.utilisation - 1e-9)),
        )
        for role in Role
    )
    return Split(prefill, decode)


def lacking(busy: Busy, split: Split) -> Role | None:
    """Return the role that should get an engine; None: neither lacks one, or none can be spared."""
    for role in Role:
        giver = OTHER[role]
        if not split.for_role(giver):
            continue
        pressure = busy.pressure(role, split)
        after = busy.pressure(giver, split.after_change(role))
        if pressure > 1.0 and after <= GIVES and pressure > MARGIN * after:
            return role
    return None


def is_short(busy: Busy, split: Split) -> bool:
    """Tell whether a role lacks an engine."""
    return any(busy.pressure(role, split) > 1.0 for role in Role)
