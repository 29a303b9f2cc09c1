"""Chooses the next key while requests wait: the one that was served the fewest tokens.

These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, algorithm 2): a key's counter grows by the tokens of its requests, and the waiting key
with the smallest counter is next. A key that comes to the queue is lifted to the smallest counter
there, so no key saves up while it is away.

On admission a request is charged the estimate for its prompt, and at its end the difference to its
real cost: the length of an answer is unknown before.
"""

from collections.abc import Set
from math import inf
from typing import Final

from pdrelay_proxy.core.admission.ticket import Ticket

# of a prompt whose tokens are not counted yet; for English text and common tokenizers
BYTES_PER_TOKEN: Final = 4


class FairShares:
    """The counters of keys, and the waiting requests. A priority comes before any counter."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # tokens; all keys began at 0
        # by priority and key; no dict in it is empty
        self._waiting: dict[int, dict[str, dict[Ticket, None]]] = {}
        self._queued: dict[str, int] = {}  # by key, of all priorities; none is 0
        # tokens charged to admitted requests that are not over
        self._charged: dict[Ticket, int] = {}
        self._last = 0.0  # the counter of the key that left the queue last

    def __len__(self) -> int:
        """Return the number of keys with a counter."""
        return len(self._served)

    def served(self, key: str) -> float:
        """Return the counter of a key."""
        return self._served.get(key, self._last)

    def charge(self, key: str, tokens: float) -> None:
        """Count tokens of a key's requests; negative: it was charged too many."""
        self._served[key] = self.served(key) + tokens

    def admit(self, ticket: Ticket) -> None:
        """Charge a request the estimate for its prompt."""
        self._charged[ticket] = ticket.tokens
        self.charge(ticket.key, ticket.tokens)

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """Replace that charge by the real cost of a request that is over; a request older than
        these counters was charged nothing.
        """
        self.charge(ticket.key, tokens - self._charged.pop(ticket, 0))

    def join(self, ticket: Ticket) -> None:
        """Queue a request behind those of its key and priority."""
        key = ticket.key
        queued = self._queued
        if key not in queued:
            least = min([self._served[waiting_key] for waiting_key in queued], default=self._last)
            self._served[key] = max(self.served(key), least)
        queued[key] = queued.get(key, 0) + 1
        self._waiting.setdefault(ticket.priority, {}).setdefault(key, {})[ticket] = None

    def leave(self, ticket: Ticket) -> None:
        """Remove a request from the queue."""
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
        """Return the first request of a priority's least served key; of equal ones, the first."""
        lanes = self._waiting[priority]
        served = self._served
        key = min(lanes, key=served.__getitem__)
        return next(iter(lanes[key]))

    def forget(self, held: Set[str]) -> None:
        """Drop counters that make no difference, except of keys with requests.

        A key that was served no more than the waiting ones would be lifted as high anyway. While
        none waits, there is nothing to be fair about.
        """
        least = min([self._served[waiting_key] for waiting_key in self._queued], default=inf)
        for key in [
            key for key, served in self._served.items() if served <= least and key not in held
        ]:
            del self._served[key]
