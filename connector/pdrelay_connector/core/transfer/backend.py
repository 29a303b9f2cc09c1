"""The health of the NIXL backend with which a worker reads and writes, and what helps a transfer
that has failed.

A connection to one peer may die while both engines live (a port that flaps, a switch that forgets
it), and then every later transfer with that peer fails: NIXL 1.5.1 does not connect again by
itself. So a failed transfer is tried again over a new connection, and if that fails too, over a new
backend. The latter is for a backend that works with no peer: while transfers with others go well,
one peer's failures are that peer's. What neither helps fails as before, and its prompt is computed.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from math import inf
from typing import Final

from pdrelay_connector.core.state_machine import transition

# New backends within PERIOD. Each registers the memory once more, and may keep the one before it
# for as long as a peer hangs. A backend that three of them do not mend is broken elsewhere: a NIC,
# a network, a peer.
MAX_REBUILDS: Final = 3
PERIOD: Final = 600.0  # s
# s between a failure and the next try: the side channel of a peer that has ended closes meanwhile,
# and NIXL has a moment to close the old connection (ai-dynamo/nixl#2109).
PAUSE: Final = 0.1


class BackendState(Enum):
    """What is known of a backend."""

    HEALTHY = auto()
    SUSPECT = auto()  # a transfer has failed, and none that began later has succeeded
    REBUILDING = auto()
    FAILED = auto()  # new backends have not helped: failures are final until the next may be built


class BackendEvent(Enum):
    """What can happen to it."""

    TROUBLED = auto()  # a transfer has failed, or does not end
    WORKED = auto()  # a transfer that began after the trouble has succeeded
    REBUILD_BEGUN = auto()
    REBUILT = auto()
    NOT_REBUILT = auto()  # NIXL could not build another
    EXHAUSTED = auto()  # too many were built lately


TRANSITIONS: Final[Mapping[BackendState, Mapping[BackendEvent, BackendState]]] = {
    BackendState.HEALTHY: {BackendEvent.TROUBLED: BackendState.SUSPECT},
    BackendState.SUSPECT: {
        BackendEvent.TROUBLED: BackendState.SUSPECT,
        BackendEvent.WORKED: BackendState.HEALTHY,
        BackendEvent.REBUILD_BEGUN: BackendState.REBUILDING,
        BackendEvent.EXHAUSTED: BackendState.FAILED,
    },
    BackendState.REBUILDING: {
        BackendEvent.REBUILT: BackendState.SUSPECT,  # until it has moved something
        BackendEvent.NOT_REBUILT: BackendState.FAILED,
    },
    BackendState.FAILED: {
        BackendEvent.TROUBLED: BackendState.FAILED,
        BackendEvent.WORKED: BackendState.HEALTHY,
        BackendEvent.REBUILD_BEGUN: BackendState.REBUILDING,
        BackendEvent.EXHAUSTED: BackendState.FAILED,
    },
}


class Remedy(Enum):
    """What a transfer that has failed gets."""

    RECONNECTION = auto()  # another connection to its peer
    REBUILD = auto()  # another backend
    NONE = auto()  # its failure is final


class BackendHealth:
    """Decides; who asks does it. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.state = BackendState.HEALTHY
        self._troubled_at = inf  # the latest trouble
        self._worked_since = -inf  # when the latest transfer that has succeeded began
        self._rebuilds: deque[float] = deque(maxlen=MAX_REBUILDS)

    def on(self, event: BackendEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, "NIXL's backend")

    def worked(self, *, begun_at: float) -> None:
        """Note that a transfer has succeeded."""
        self._worked_since = max(self._worked_since, begun_at)
        if begun_at > self._troubled_at:
            self.on(BackendEvent.WORKED)
            self._troubled_at = inf

    def troubled(self, *, now: float) -> None:
        """Note that a transfer has failed, or does not end."""
        self.on(BackendEvent.TROUBLED)
        self._troubled_at = now

    def remedy(self, before: Remedy | None, *, since: float, now: float, kept: int) -> Remedy:
        """Return what a failed transfer gets next.

        ``before``: what it has got already; ``since``: when it first failed; ``kept``: earlier
        backends that still have a transfer in flight.
        """
        if before is None:
            return Remedy.RECONNECTION
        if before is not Remedy.RECONNECTION or self._worked_since > since:
            return Remedy.NONE
        return Remedy.REBUILD if self.may_rebuild(now=now, kept=kept) else Remedy.NONE

    def may_rebuild(self, *, now: float, kept: int) -> bool:
        """Whether another backend may be built now; if not, it counts as failed."""
        is_full = len(self._rebuilds) == MAX_REBUILDS and now < self._rebuilds[0] + PERIOD
        if is_full or kept >= MAX_REBUILDS:
            self.on(BackendEvent.EXHAUSTED)
            return False
        return True

    def rebuild_begun(self, *, now: float) -> None:
        """Note that another backend is being built."""
        self.on(BackendEvent.REBUILD_BEGUN)
        self._rebuilds.append(now)
