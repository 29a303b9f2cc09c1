"""The connections of all clients: how many there may be, whose they are, and which must get on
within a time.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pdrelay_proxy.core.http.framing import RefusalReason
from pdrelay_proxy.errors import TooManyConnections
from pdrelay_proxy.io.fair_timeout import LateTimer
from pdrelay_proxy.settings import OverloadStatus

_RETRY_AFTER_S: Final = 5
# connections above a limit that are told so; more are closed without a word
_SPARE_MOST: Final = 128
_SPARE_SHARE: Final = 8  # there are as many as one for so many of the limit
_LOOKS: Final = 4  # in the shortest time that a connection may take for something
_LOOK_MOST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may take; None: no limit."""

    head_s: float = 10.0  # seconds to the end of a head
    body_s: float = 30.0  # seconds to the end of a body, and one more for each 16 KiB of it
    connections: int | None = None
    per_address: int | None = None  # connections
    # what a connection over a limit gets
    overload: OverloadStatus = OverloadStatus.SERVICE_UNAVAILABLE


class Timed(Protocol):
    """A connection that has to get on."""

    def due(self, *, elapsed: float) -> float | None:
        """Return when it has had time enough, on the loop's clock; None: it has nothing to finish.

        ``elapsed``: seconds since this was asked last.
        """
        ...

    def on_overdue(self) -> None:
        """It has had time enough."""
        ...


class Clients:
    """One for the process. A connection that has nothing to finish costs nothing here."""

    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        on_refused: Callable[[RefusalReason], None] = lambda _: None,
        charge: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.bounds = bounds or Bounds()
        self.on_refused = on_refused  # is told of each connection that is refused
        # take so many bytes of those that all requests may hold; fewer than 0: give them back
        self.charge = charge
        self._count = 0
        self._by_address = Counter[str]()
        self._unfinished: dict[Timed, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = LateTimer()
        self._look_s = min(_LOOK_MOST_S, self.bounds.head_s / _LOOKS, self.bounds.body_s / _LOOKS)

    def enter(self, host: str | None) -> tuple[str | None, RefusalReason | None]:
        """Count a connection; return by what name ``leave`` has to be told of it, and why it is
        refused, if it is.
        """
        self._count += 1
        bounds = self.bounds
        name = None
        if bounds.per_address is not None and host is not None:
            name = network_of(host)
            self._by_address[name] += 1
        if bounds.connections is not None and self._count > bounds.connections:
            return name, RefusalReason.CONNECTIONS
        if (
            name is not None
            and bounds.per_address is not None
            and self._by_address[name] > bounds.per_address
        ):
            return name, RefusalReason.ADDRESS
        return name, None

    def leave(self, name: str | None, connection: Timed) -> None:
        """Forget a connection that has ended."""
        self._unfinished.pop(connection, None)
        self._count -= 1
        if name is not None:
            self._by_address[name] -= 1
            if not self._by_address[name]:
                del self._by_address[name]

    def refusal(self, fault: RefusalReason, name: str | None) -> TooManyConnections | None:
        """Return what a connection over a limit is told; None: there are too many of them to tell
        them.
        """
        bounds = self.bounds
        if _is_far_over(self._count, bounds.connections):
            return None
        if name is not None and _is_far_over(self._by_address[name], bounds.per_address):
            return None
        if fault is RefusalReason.ADDRESS:
            said = (
                f"this address has {bounds.per_address} connections to the router, the most it may "
                f"have ({fault})"
            )
        else:
            said = (
                f"the router has {bounds.connections} connections of clients, the most it may have "
                f"({fault})"
            )
        return TooManyConnections(said, retry_after_s=_RETRY_AFTER_S)

    def watch(self, connection: Timed) -> None:
        """Look after a connection until it has nothing to finish."""
        self._unfinished[connection] = None
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def _look(self) -> None:
        """One timer for all of them."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_late = self._lateness.is_late(now)
        for connection in tuple(self._unfinished):
            due = connection.due(elapsed=self._look_s)
            if due is None:
                self._unfinished.pop(connection, None)
            elif now >= due and not is_late:
                connection.on_overdue()
        if self._unfinished and self._timer is None:
            self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._look_s
        self._lateness.expect(due)
        self._timer = loop.call_at(due, self._look)


def _is_far_over(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit + min(_SPARE_MOST, limit // _SPARE_SHARE + 1)


def network_of(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the 64 bits of IPv6 that one customer
    gets at least.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
