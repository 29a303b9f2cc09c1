"""Which key is next while requests wait: the one that was served the fewest tokens.

These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, algorithm 2): a key's counter grows by the tokens of its requests, and the waiting key
with the smallest counter is next. A key that comes to the queue is lifted to the smallest counter
there, so nobody saves up while away.

A request is charged what its prompt seems to have when it is admitted, and the difference to what
it has cost when it is over: nobody knows before how long an answer gets.
"""

from collections.abc import Set
from math import inf
from typing import Final

from pdrelay_proxy.core.admission.ticket import Ticket

# of a prompt whose tokens are not counted yet; English text and common tokenizers
BYTES_PER_TOKEN: Final = 4


class FairShares:
    """The counters of keys, and who waits. A priority comes before any counter."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # tokens, since everybody began at 0
        # by priority and key; none is empty
        self._waiting: dict[int, dict[str, dict[Ticket, None]]] = {}
        self._queued: dict[str, int] = {}  # by key, of all priorities; none is 0
        # tokens, of those that were admitted and are not over
        self._charged: dict[Ticket, int] = {}
        self._last = 0.0  # the counter of the key that left the queue last

    def __len__(self) -> int:
        """Return of how many keys something is remembered."""
        return len(self._served)

    def served(self, key: str) -> float:
        """Return the counter of a key."""
        return self._served.get(key, self._last)

    def charge(self, key: str, tokens: float) -> None:
        """Count tokens of a key's requests; fewer than 0: it was charged too many."""
        self._served[key] = self.served(key) + tokens

    def admit(self, ticket: Ticket) -> None:
        """Charge a request what its prompt seems to have."""
        self._charged[ticket] = ticket.tokens
        self.charge(ticket.key, ticket.tokens)

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """A request is over: charge what it has cost in place of that; one that came before these
        counters was charged nothing.
        """
        self.charge(ticket.key, tokens - self._charged.pop(ticket, 0))

    def join(self, ticket: Ticket) -> None:
        """A request waits, behind those of its key and priority."""
        key = ticket.key
        queued = self._queued
        if key not in queued:
            least = min([self._served[one] for one in queued], default=self._last)
            self._served[key] = max(self.served(key), least)
        queued[key] = queued.get(key, 0) + 1
        self._waiting.setdefault(ticket.priority, {}).setdefault(key, {})[ticket] = None

    def leave(self, ticket: Ticket) -> None:
        """It waits no more."""
        key = ticket.key
        lanes = self._waiting[ticket.priority]
        lane = lanes[key]
        del lane[ticket]
        if not lane:
            del lanes[key]
        if not lanes:
            del self._waiting[ticket.priority]
        self._queued[key] -= 1
        if not self._queued[key]:
            del self._queued[key]
            self._last = self._served[key]

    def next(self, priority: int) -> Ticket:
        """Return the first request of the key that was served least, of those of a priority; of
        equals, the first.
        """
        lanes = self._waiting[priority]
        served = self._served
        key = min(lanes, key=served.__getitem__)
        return next(iter(lanes[key]))

    def forget(self, held: Set[str]) -> None:
        """Drop what says nothing of keys, but for those that have requests.

        A key that was served no more than those that wait would be lifted as high anyway. While
        nobody waits, there is nothing to be fair about.
        """
        least = min([self._served[one] for one in self._queued], default=inf)
        for key in [
            key for key, served in self._served.items() if served <= least and key not in held
        ]:
            del self._served[key]
