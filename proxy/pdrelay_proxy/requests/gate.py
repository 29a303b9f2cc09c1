"""The gate before the first leg: says when a request that waits has its turn, and takes its place
back.
"""

import asyncio
import time
from collections.abc import Callable

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.limits import Limit, Refusal
from pdrelay_proxy.core.admission.ticket import Ticket
from pdrelay_proxy.errors import KeyOverLimit, RouterFull
from pdrelay_proxy.settings import Settings


class Gate:
    """One for the router, on its one event loop."""

    def __init__(
        self,
        limits: Settings,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_other_routers: bool = False,
    ) -> None:
        """``has_other_routers``: rates are limits of all of them together."""
        # its counts are for whoever watches
        self.admission = Admission(limits, has_other_routers=has_other_routers)
        self._clock = clock
        self._watching: dict[Ticket, Callable[[], None]] = {}  # of those that wait

    def arrive(
        self, key: str, priority: int, size: int, tokens: int | None = None, *, prompts: int = 1
    ) -> Ticket:
        """Return the ticket of a request: admitted, waiting or refused.

        It has to ``leave`` in any case.

        ``size``: bytes of its body; ``tokens``: about how many its prompt has; None: as many as its
        bytes suggest; ``prompts``: of a request with several.
        """
        ticket = self.admission.arrive(key, priority, size, self._clock(), tokens, prompts=prompts)
        if self.admission.news:
            self._wake()
        return ticket

    def watch(self, ticket: Ticket, act: Callable[[], None]) -> None:
        """Call ``act`` when a ticket waits no more."""
        self._watching[ticket] = act

    def unwatch(self, ticket: Ticket) -> None:
        """Do not."""
        del self._watching[ticket]

    def check(self, ticket: Ticket) -> None:
        """Accept a ticket that was admitted.

        Raises:
            KeyOverLimit: its key has too many requests, or too many a second.
            RouterFull: the router has, and it did not get better while the request waited.
        """
        if ticket.refusal is not None:
            raise _refused(ticket.refusal, ticket.key, self.admission.limits)

    def leave(self, ticket: Ticket, tokens: int | None = None) -> None:
        """Give back a place, or the wait for one; ``tokens``: what was served, if it is known."""
        admission = self.admission
        if ticket.refusal is None:
            if admission.counts_tokens:
                admission.leave(ticket, tokens, now=self._clock())
            else:
                admission.leave(ticket)
            if self.admission.news:
                self._wake()

    def expire(self) -> None:
        """Send away those that have waited too long."""
        if self.admission.waiting:
            self.admission.expire(now=self._clock())
            self._wake()

    def hold(self, size: int) -> None:
        """Charge bytes of a body that is not complete.

        Raises:
            RouterFull: the router holds as many as it may.
        """
        if not self.admission.hold(size):
            raise _refused(self.admission.no_bytes(), "", self.admission.limits)

    def free(self, size: int) -> None:
        """Give back bytes that were held."""
        self.admission.charge(-size)

    def change(self, limits: Settings) -> None:
        """Go by other limits from now on."""
        self.admission.change(limits, now=self._clock())
        self._wake()

    def _wake(self) -> None:
        """Tell those that waited what has become of them."""
        if not self.admission.news:
            return
        loop = asyncio.get_running_loop()
        for ticket in self.admission.poll():
            # not from here: each may end at once, and wake the next one
            loop.call_soon(self._watching[ticket])


def _refused(refusal: Refusal, key: str, limits: Settings) -> KeyOverLimit | RouterFull:
    sentences = {
        Limit.KEY_RATE: f"the key {key} sends more than {limits.max_key_rate} requests a second",
        Limit.KEY_TOKENS: f"the key {key} has used more than {limits.max_key_tokens_per_minute} tokens in a minute",
        Limit.KEY_CONCURRENCY: f"the key {key} has {limits.max_key_concurrency} requests at work already",
        Limit.RATE: f"the router takes {limits.max_rate} requests a second, and this one is over it",
        Limit.BYTES: "the router holds as many bytes of requests as it may",
        Limit.QUEUE: "the router has as many requests waiting as it may",
        Limit.CONCURRENCY: f"the router had no place for this request within {limits.max_queue_wait_s:g} s",
    }
    kind = KeyOverLimit if refusal.limit.is_the_keys else RouterFull
    return kind(
        f"{sentences[refusal.limit]} ({refusal.limit})", retry_after_s=refusal.retry_after_s
    )
