"""Routers that are silent: the highest numbers of their datagrams, for as long as somebody could repeat one of those.

A datagram is good while the clock of its sender and that of its receiver are at most ``SKEW_S`` apart, so one from a
clock that is ahead is good for twice that.
"""

from typing import Final

from pdrelay_proxy.core.peer_datagrams import SKEW_S

_KEPT_S: Final = 2 * SKEW_S
_MOST: Final = 1024  # routers; of more those are forgotten that went first


class DepartedRouters:
    """What one kind of datagrams needs to know of them. ``now``: seconds of a clock that only rises."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[int, float]] = {}  # sequence and time, in order of departure

    def add(self, router: bytes, sequence: int, *, now: float) -> None:
        """A router is silent; ``sequence``: the highest that was heard of it."""
        self._found.pop(router, None)
        self._found[router] = sequence, now
        if len(self._found) > _MOST:
            del self._found[next(iter(self._found))]

    def sequence(self, router: bytes) -> int:
        """Return the highest sequence of a router, up to which all was sent before it fell silent; 0: none is known."""
        found = self._found.get(router)
        return 0 if found is None else found[0]

    def remove(self, router: bytes) -> None:
        """A router is back."""
        self._found.pop(router, None)

    def expire(self, *, now: float) -> None:
        """Forget those whose datagrams are all too old by now."""
        for router in [router for router, (_, at) in self._found.items() if now > at + _KEPT_S]:
            del self._found[router]
