"""Transfers that a prefill engine remembers without a lease: those that a decode engine has named
before their prefill has finished, and those that are over.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdrelay_connector.core.ids import ConnId, RequestId

T = TypeVar("T")

MAX_REMEMBERED = 65536  # transfers of each kind; beyond it the oldest are forgotten


@dataclass(slots=True)
class EarlyInterest:
    """A decode engine's messages about a transfer before its prefill has finished."""

    peer: ConnId | None  # the connection that renews; absent: the transfer is not wanted any more
    until: float


class RememberedTransfers:
    """Each is remembered for so many ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # These two are emptied from the front, which takes a plain dict longer the more it has
        # lost.
        # the longest unheard of first
        self._early: OrderedDict[RequestId, EarlyInterest] = OrderedDict()
        self._early_by_conn: dict[ConnId, dict[RequestId, None]] = {}
        # transfers that are over -> remembered until
        self._over: OrderedDict[RequestId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._early) + len(self._over)

    def note(self, request: RequestId, conn: ConnId | None, *, now: float) -> None:
        """A transfer is wanted over a connection; without one, it is not wanted any more."""
        self.take_early(request)
        self._early[request] = EarlyInterest(conn, now + self._seconds)
        if conn is not None:
            self._early_by_conn.setdefault(conn, {})[request] = None

    def take_early(self, request: RequestId) -> EarlyInterest | None:
        """Forget a transfer whose prefill has ended, and return who wanted it."""
        early = self._early.pop(request, None)
        if early is not None and early.peer is not None:
            names = self._early_by_conn[early.peer]
            del names[request]
            if not names:
                del self._early_by_conn[early.peer]
        return early

    def wanted_by(self, conn: ConnId) -> Sequence[RequestId]:
        """Return the transfers that are wanted over a connection."""
        return list(self._early_by_conn.get(conn, ()))

    def owner(self, request: RequestId) -> ConnId | None:
        """Return the connection over which a transfer is wanted."""
        early = self._early.get(request)
        return early.peer if early is not None else None

    def end(self, request: RequestId, *, now: float) -> None:
        """A transfer is over."""
        self._over.pop(request, None)
        self._over[request] = now + self._seconds

    def begin_again(self, request: RequestId) -> None:
        """The name of a transfer that is over, if it is, belongs to another one."""
        self._over.pop(request, None)

    def is_over(self, request: RequestId) -> bool:
        """Whether a transfer is over."""
        return request in self._over

    def advance(self, *, now: float) -> None:
        """Forget transfers that were named and never prefilled, or are long over."""
        for request in _old(self._early, now, lambda early: early.until):
            self.take_early(request)
        for request in _old(self._over, now, lambda until: until):
            del self._over[request]


def _old(
    entries: OrderedDict[RequestId, T], now: float, until: Callable[[T], float]
) -> Iterator[RequestId]:
    """Name the first entries, for the caller to drop, whose time is over or that are too many."""
    while entries:
        request, entry = next(iter(entries.items()))
        if until(entry) > now and len(entries) <= MAX_REMEMBERED:
            return
        yield request
