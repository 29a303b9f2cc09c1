"""The connections of all clients: their limits, their addresses, and their deadlines."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from pdrelay_proxy.errors import TooManyConnections
from pdrelay_proxy.io.fair_timeout import LateTimer
from pdrelay_proxy.settings import OverloadStatus

_RETRY_AFTER_S: Final = 5
# connections above a limit that get an answer; more are closed without one
_SPARE_MOST: Final = 128
_SPARE_SHARE: Final = 8  # at most the limit divided by this, plus one
_CHECKS: Final = 4  # checks in the shortest time limit of a connection
_CHECK_MOST_S: Final = 1.0


class RefusalReason(StrEnum):
    """Why a connection was closed before its request was served, as the metric names it."""

    MALFORMED = "malformed"
    HEAD = "head_too_large"  # or trailers
    URI = "uri_too_long"
    METHOD = "method"  # CONNECT
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    CONNECTIONS = "max_connections"
    ADDRESS = "max_connections_per_address"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of clients; None: no limit."""

    head_s: float = 10.0  # seconds to the end of a head
    body_s: float = 30.0  # seconds to the end of a body, and one more for each 16 KiB of it
    connections: int | None = None
    per_address: int | None = None  # connections
    # the status for a connection over a limit
    overload: OverloadStatus = OverloadStatus.SERVICE_UNAVAILABLE


class Timed(Protocol):
    """A connection with a deadline."""

    def due(self, *, elapsed: float) -> float | None:
        """Return the deadline, on the loop's clock; None: it has nothing to finish.

        ``elapsed``: seconds since the last call.
        """
        ...

    def on_overdue(self) -> None:
        """Handle a missed deadline."""
        ...


class Clients:
    """One for each listening port. A connection that has nothing to finish costs nothing here."""

    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        on_refused: Callable[[RefusalReason], None] = lambda _: None,
        charge: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.bounds = bounds or Bounds()
        self.on_refused = on_refused  # called for each refused connection
        # charges bytes to the limit of all requests; negative: gives them back
        self.charge = charge
        self._count = 0
        self._by_address = Counter[str]()
        self._unfinished: dict[Timed, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = LateTimer()
        self._check_s = min(
            _CHECK_MOST_S, self.bounds.head_s / _CHECKS, self.bounds.body_s / _CHECKS
        )

    def enter(self, host: str | None) -> tuple[str | None, RefusalReason | None]:
        """Count a connection; return the network for ``leave``, and the reason if it is refused."""
        self._count += 1
        bounds = self.bounds
        network = None
        if bounds.per_address is not None and host is not None:
            network = network_of(host)
            self._by_address[network] += 1
        if bounds.connections is not None and self._count > bounds.connections:
            return network, RefusalReason.CONNECTIONS
        if (
            network is not None
            and bounds.per_address is not None
            and self._by_address[network] > bounds.per_address
        ):
            return network, RefusalReason.ADDRESS
        return network, None

    def leave(self, network: str | None, connection: Timed) -> None:
        """Forget a connection that has ended."""
        self._unfinished.pop(connection, None)
        self._count -= 1
        if network is not None:
            self._by_address[network] -= 1
            if not self._by_address[network]:
                del self._by_address[network]

    def refusal(self, fault: RefusalReason, network: str | None) -> TooManyConnections | None:
        """Return the error for a connection over a limit; None: there are too many to answer."""
        bounds = self.bounds
        if _is_far_over(self._count, bounds.connections):
            return None
        if network is not None and _is_far_over(self._by_address[network], bounds.per_address):
            return None
        if fault is RefusalReason.ADDRESS:
            text = (
                f"this address has {bounds.per_address} connections to the router, the most it may "
                f"have ({fault})"
            )
        else:
            text = (
                f"the router has {bounds.connections} connections of clients, the most it may have "
                f"({fault})"
            )
        return TooManyConnections(text, retry_after_s=_RETRY_AFTER_S)

    def watch(self, connection: Timed) -> None:
        """Check a connection's deadline until it has nothing to finish."""
        self._unfinished[connection] = None
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def _check(self) -> None:
        """Check all deadlines; one timer serves all connections."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_late = self._lateness.is_late(now)
        for connection in tuple(self._unfinished):
            due = connection.due(elapsed=self._check_s)
            if due is None:
                self._unfinished.pop(connection, None)
            elif now >= due and not is_late:
                connection.on_overdue()
        if self._unfinished and self._timer is None:
            self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._check_s
        self._lateness.expect(due)
        self._timer = loop.call_at(due, self._check)


def _is_far_over(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit + min(_SPARE_MOST, limit // _SPARE_SHARE + 1)


def network_of(host: str) -> str:
    """Return the network that counts as one address: an IPv4 address, or the 64 bits of IPv6 that a
    customer gets at least.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
