"""One engine, and all that is known of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import EngineHealth
from pdrelay_proxy.core.fleet.load import Load
from pdrelay_proxy.core.fleet.lone_prompts import LonePrompts
from pdrelay_proxy.core.fleet.target import BY_HAND, Origin
from pdrelay_proxy.core.fleet.turns import RoleTurn
from pdrelay_proxy.core.model import EngineRole, Instance, Role

KV_BOTH: Final = "kv_both"  # vLLM's kv_role of an engine that sends and loads KV
_SURE: Final = 2  # readings in a row: vLLM's numbers are those of its step before


@dataclass(slots=True)
class Drain:
    """What is seen of an engine while it is drained: its own requests end first, then what decode
    engines may read.
    """

    since: float  # when it got its last request, or was told to drain
    kept: float | None = None  # as it said last; None: it does not say
    zeros: int = 0  # readings in a row that said that nothing is kept
    moves: bool = False  # its streams go on at other engines (features/moving_streams)
    moves_by_hand: bool = False  # they shall also when no turn asks for it
    by_turn: bool = False  # for a turn alone: nobody wants it drained when that is over

    def reading(self, kept: float | None) -> None:
        """Take in what it said of the blocks it keeps."""
        self.kept = kept
        self.zeros = self.zeros + 1 if kept == 0 else 0

    def verdict(self, role: Role, in_flight: int, *, patience_s: float, now: float) -> str | None:
        """Say why it is empty; None: it is not.

        A prefill engine that does not say what it keeps, or seems to keep it for ever, is believed
        to be empty after ``patience_s`` seconds without a request: by then its leases have run out.
        """
        if in_flight:
            self.since = now
            self.zeros = 0
            return None
        if role is Role.DECODE:
            return "has no request left"
        if self.zeros >= _SURE:
            return "has no request left and keeps nothing for decode engines"
        if now < self.since + patience_s:
            return None
        reason = (
            "does not say what it keeps"
            if self.kept is None
            else f"still shows {self.kept:g} of what it keeps"
        )
        return f"has had no request for {patience_s:g} s, but {reason}"


@dataclass(slots=True)
class Member:
    """One engine, and all that is known of it."""

    instance: Instance  # of one that serves both roles: as a prefill engine
    life: EngineHealth
    load: Load = field(default_factory=Load)
    # filled in if the decode policy remembers prompts
    lone: LonePrompts = field(default_factory=LonePrompts)
    facts: EngineCapabilities = field(default_factory=EngineCapabilities)
    # when it was last asked what it is, by a clock that only rises
    asked_at: float = -math.inf
    drain: Drain | None = None  # while it is drained
    retires: bool = False  # it is forgotten once it is drained
    origin: Origin = BY_HAND  # who wants it here
    # of one that serves both roles; None: it serves that of ``instance``
    as_decode: Instance | None = None
    turn: RoleTurn | None = None  # while it turns
    # the number of times that it has turned: what was learned of it before is not true any more
    stint: int = 0

    @property
    def may_be_new(self) -> bool:
        """Tell whether it may have become another process since it was asked what it is."""
        return self.life.cache_since > self.asked_at

    @property
    def role(self) -> EngineRole:
        """What it serves, also while it turns to something else."""
        if self.as_decode is not None:
            return EngineRole.BOTH
        return EngineRole.PREFILL if self.instance.role is Role.PREFILL else EngineRole.DECODE

    @property
    def heading(self) -> EngineRole:
        """What it serves, or turns to."""
        return self.role if self.turn is None else self.turn.to

    @property
    def leaves_decode(self) -> bool:
        """Tell whether it turns away from decode."""
        return self.turn is not None and Role.DECODE in self.leaves_by(self.turn.to)

    def leaves_by(self, to: EngineRole) -> Sequence[Role]:
        """List the roles that it serves, and would not any more."""
        return [role for role in Role if self.role.serves(role) and not to.serves(role)]

    def serves_or_will(self, role: Role) -> bool:
        """Tell whether it serves a role, or turns to it."""
        return self.role.serves(role) or self.heading.serves(role)

    def as_role(self, role: Role) -> Instance | None:
        """Return the engine as it serves a role; None: it does not."""
        return self.instance if self.instance.role is role else self.as_decode

    def serve(self, role: EngineRole) -> None:
        """Serve this and nothing else."""
        self.stint += 1
        self.as_decode = self.in_role(Role.DECODE) if role is EngineRole.BOTH else None
        self.instance = self.in_role(Role.DECODE if role is EngineRole.DECODE else Role.PREFILL)

    def in_role(self, role: Role) -> Instance:
        """Return the engine as if it served a role, whether it does or not."""
        instance = self.instance
        return Instance(
            instance.id,
            role,
            instance.address,
            instance.rank,
            None if role is instance.pool else instance.pool,
        )
