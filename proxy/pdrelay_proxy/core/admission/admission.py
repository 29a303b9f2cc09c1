"""Decides which request is served, waits or is refused: one ticket for each request, one table for
its life.

A request over a limit of its key is refused on arrival, so those that wait need one thing only: a
place among the served requests. They get places by priority and, within a priority, in the order
they came, or by what their keys were served so far (core/admission/fair_shares.py). When the queue
is full, a request of lower priority is refused in favour of a new one, if it is of the same key or
of a key with more than its share of the queue; so overload ends in refusals and never in a longer
queue.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from pdrelay_proxy.core.admission.fair_shares import BYTES_PER_TOKEN, FairShares
from pdrelay_proxy.core.admission.key_usage import KeyUsage, note_usage
from pdrelay_proxy.core.admission.limits import Limit, Refusal, TokenBucket, TokenQuota
from pdrelay_proxy.core.admission.ticket import Ticket, TicketEvent, TicketState
from pdrelay_proxy.settings import QueueOrder, Settings

_RETRY_SOON_S: Final = (
    1  # seconds; the limit is the client's own: a place is free when one of its requests ends
)
_RETRY_LATER_S: Final = 5  # seconds; how long an overload lasts is unknown
_ADMITTED: Final = TicketState.ADMITTED
_ADMIT: Final = TicketEvent.ADMIT
_LEAVE: Final = TicketEvent.LEAVE
_FAIR: Final = QueueOrder.FAIR


@dataclass(slots=True)
class _Account:
    """One key's requests in flight and waiting, and its rates."""

    held: int = 0
    waiting: int = 0
    bucket: TokenBucket = field(default_factory=TokenBucket)
    quota: TokenQuota = field(default_factory=TokenQuota)

    def is_idle(self, *, now: float) -> bool:
        """Return whether a new account would be the same, except for ``held``."""
        return self.bucket.is_full(now=now) and self.quota.is_full(now=now)


class Admission:
    """Hands out places.

    ``poll`` returns the other tickets that a call has changed, each once.
    """

    def __init__(self, limits: Settings, *, has_other_routers: bool = False) -> None:
        """``has_other_routers``: rates are limits of all routers together."""
        self.limits = limits
        self._has_other_routers = has_other_routers
        self.admitted = 0
        self.waiting = 0
        self.held_bytes = 0
        self.refused: Counter[Limit] = Counter()  # ever
        # by priority, in order of arrival; no lane is empty
        self._lanes: dict[int, dict[Ticket, None]] = {}
        self._accounts: dict[str, _Account] = {}
        self._bucket = TokenBucket()
        self._shares = FairShares() if limits.queue_order is _FAIR else None
        self._has_rates = _has_rates(limits)
        self.shares_limits = has_other_routers and self._has_rates
        # whether ``leave`` needs a request's tokens
        self.counts_tokens = _counts_tokens(limits)
        self.news: list[Ticket] = []  # what ``poll`` will return
        # of the fleet's limits: less while other routers are silent
        self.share = 1.0
        # by key; empty name: all together. Filled if limits are the fleet's
        self.usage: dict[str, KeyUsage] = {}

    def arrive(
        self,
        key: str,
        priority: int,
        size: int,
        now: float,
        tokens: int | None = None,
        *,
        prompts: int = 1,
    ) -> Ticket:
        """Admit a request, queue it or refuse it, as its state says.

        ``size``: bytes of its body; ``tokens``: estimated tokens of its prompt; None: estimated by
        its bytes; ``prompts``: of a request with several. Rates count prompts, so an admitted
        request may use up the rate of later ones.
        """
        limits = self.limits
        estimate = size // BYTES_PER_TOKEN if tokens is None else tokens
        ticket = Ticket(key, priority, size, now + limits.max_queue_wait_s, tokens=estimate)
        account = self._accounts.get(key) or self._new_account(key, now=now)
        if (refusal := self._refusal_on_arrival(ticket, account, now)) is not None:
            self._refuse(ticket, TicketEvent.REFUSE, refusal)
            return ticket
        account.held += 1
        self.held_bytes += size
        if self._has_rates:
            self._charge_limits(ticket, account, prompts, now)
        if self.admitted < limits.max_concurrency:
            self._admit(ticket)
        else:
            self._queue(ticket, now)
        return ticket

    def _charge_limits(self, ticket: Ticket, account: _Account, prompts: int, now: float) -> None:
        """Charge an admitted request to the rates of its key and of all keys."""
        limits = self.limits
        if limits.max_key_rate is not None:
            account.bucket.charge(limits.max_key_rate * self.share, now=now, count=prompts)
        if limits.max_rate is not None:
            # One array of prompts must not use up more than a second of the rate of all clients.
            rate = limits.max_rate * self.share
            self._bucket.charge(rate, now=now, count=min(prompts, max(1, int(rate))))
        if limits.max_key_tokens_per_minute is not None:
            account.quota.charge(
                limits.max_key_tokens_per_minute * self.share, ticket.tokens, now=now
            )
            ticket.charged = ticket.tokens
        if self.shares_limits:
            note_usage(self.usage, ticket.key, prompts, ticket.tokens)
            ticket.reported = ticket.tokens

    def grant_extra_place(self, holder: Ticket) -> Ticket | None:
        """Return another place for an admitted request, under its key and priority; None: none is
        free now.

        Of a request with several prompts, one is served at the request's own place, and each one
        served beside it needs another. A prompt never waits in the queue, where its request would
        wait for those behind it; and it takes no place that a queued request of its priority could
        have. ``leave`` gives the place back.
        """
        limits = self.limits
        account = self._accounts[holder.key]
        if self.admitted >= limits.max_concurrency:
            return None
        if limits.max_key_concurrency is not None and account.held >= limits.max_key_concurrency:
            return None
        if self._lanes and min(self._lanes) <= holder.priority:
            return None
        place = Ticket(holder.key, holder.priority, 0, holder.due)
        account.held += 1
        self._admit(place)
        return place

    def hold(self, size: int) -> bool:
        """Charge bytes of an incomplete body, which has no ticket yet; False: too few are left."""
        if self.held_bytes + size > self.limits.max_inflight_bytes:
            return False
        self.held_bytes += size
        return True

    def charge(self, size: int) -> None:
        """Charge bytes that cannot be refused; negative: give back held bytes."""
        self.held_bytes += size

    def no_bytes(self) -> Refusal:
        """Count a request that is refused while its body is being received."""
        self.refused[Limit.BYTES] += 1
        return Refusal(Limit.BYTES, _RETRY_LATER_S)

    def leave(self, ticket: Ticket, tokens: int | None = None, *, now: float = 0.0) -> None:
        """Give back the place of a request that is over, or whose client has gone.

        ``tokens``: of prompt and answer, needed where ``counts_tokens``; None: unknown. ``now``:
        needed likewise.
        """
        is_served = ticket.state is _ADMITTED
        if self.counts_tokens or self._has_rates:
            cost = (ticket.tokens if tokens is None else tokens) if is_served else 0
            self._correct(ticket, cost, now=now)
            if self._shares is not None and is_served:
                self._shares.settle(ticket, cost)
        ticket.on(_LEAVE)
        if is_served:
            self.admitted -= 1
        else:
            self._unqueue(ticket)
        self._release(ticket)
        if self._lanes:
            self._fill()

    def expire(self, *, now: float) -> None:
        """Refuse requests that have waited too long."""
        for ticket in [
            ticket for lane in self._lanes.values() for ticket in lane if now >= ticket.due
        ]:
            self._evict(ticket, TicketEvent.EXPIRE, Refusal(Limit.CONCURRENCY, _RETRY_LATER_S), now)

    def charge_elsewhere(self, key: str, requests: int, tokens: int, *, now: float) -> None:
        """Charge what another router of the fleet has admitted; an empty key: of all clients."""
        limits = self.limits
        if not self.shares_limits:
            return
        if not key:
            if limits.max_rate is not None:
                self._bucket.charge(limits.max_rate * self.share, now=now, count=requests)
            return
        account = self._accounts.get(key) or self._new_account(key, now=now)
        if limits.max_key_rate is not None:
            account.bucket.charge(limits.max_key_rate * self.share, now=now, count=requests)
        if limits.max_key_tokens_per_minute is not None:
            account.quota.charge(limits.max_key_tokens_per_minute * self.share, tokens, now=now)
        if self._shares is not None:
            self._shares.charge(key, tokens)

    def change(self, limits: Settings, *, now: float) -> None:
        """Use other limits from now on; admitted requests stay admitted.

        New limits in tokens charge earlier requests when they leave.
        """
        self.limits = limits
        self._has_rates = _has_rates(limits)
        self.shares_limits = self._has_other_routers and self._has_rates
        self.counts_tokens = _counts_tokens(limits)
        is_fair = limits.queue_order is _FAIR
        if is_fair != (self._shares is not None):
            self._shares = FairShares() if is_fair else None
            if self._shares is not None:
                for ticket in [ticket for lane in self._lanes.values() for ticket in lane]:
                    self._shares.join(ticket)
        self._fill()
        while self.waiting > limits.max_queue:
            last = next(reversed(self._lanes[max(self._lanes)]))
            self._evict(last, TicketEvent.REFUSE, Refusal(Limit.QUEUE, _RETRY_LATER_S), now)

    def poll(self) -> Sequence[Ticket]:
        """Return the tickets that were admitted, refused or expired meanwhile, in that order."""
        if not self.news:
            return []
        changed = self.news
        self.news = []
        return changed

    def _refusal_on_arrival(self, ticket: Ticket, account: _Account, now: float) -> Refusal | None:
        """Check the limits of the key first: its owner can do something about them."""
        limits = self.limits
        share = self.share
        rate = limits.max_key_rate
        if rate is not None and (seconds := account.bucket.wait(rate * share, now=now)):
            return Refusal(Limit.KEY_RATE, ceil(seconds))
        quota = limits.max_key_tokens_per_minute
        if quota is not None and (seconds := account.quota.wait(quota * share, now=now)):
            return Refusal(Limit.KEY_TOKENS, ceil(seconds))
        if limits.max_key_concurrency is not None and account.held >= limits.max_key_concurrency:
            return Refusal(Limit.KEY_CONCURRENCY, _RETRY_SOON_S)
        rate = limits.max_rate
        if rate is not None and (seconds := self._bucket.wait(rate * share, now=now)):
            return Refusal(Limit.RATE, ceil(seconds))
        if self.held_bytes + ticket.size > limits.max_inflight_bytes:
            return Refusal(Limit.BYTES, _RETRY_LATER_S)
        if (
            self.admitted >= limits.max_concurrency
            and self.waiting >= limits.max_queue
            and not self._weakest(ticket)
        ):
            return Refusal(Limit.QUEUE, _RETRY_LATER_S)
        return None

    def _weakest(self, ticket: Ticket) -> Ticket | None:
        """Return the ticket that gives way to a new one: the latest of the lowest priority, among
        those that have to.

        No key takes the place of another key that has no more than its share of the queue.
        """
        waiting = {
            key: account.waiting for key, account in self._accounts.items() if account.waiting
        }
        keys = len(waiting.keys() | {ticket.key})
        yielding = {
            key
            for key, count in waiting.items()
            if key == ticket.key or count * keys > self.limits.max_queue
        }
        if yielding:
            for priority in sorted(self._lanes, reverse=True):
                if priority <= ticket.priority:
                    break
                for other in reversed(self._lanes[priority]):
                    if other.key in yielding:
                        return other
        return None

    def _release(self, ticket: Ticket) -> None:
        self._accounts[ticket.key].held -= 1
        self.held_bytes -= ticket.size

    def _admit(self, ticket: Ticket) -> None:
        ticket.on(_ADMIT)
        self.admitted += 1
        if self._shares is not None:
            self._shares.admit(ticket)

    def _queue(self, ticket: Ticket, now: float) -> None:
        if self.waiting >= self.limits.max_queue and (weakest := self._weakest(ticket)) is not None:
            self._evict(weakest, TicketEvent.REFUSE, Refusal(Limit.QUEUE, _RETRY_LATER_S), now)
        ticket.on(TicketEvent.WAIT)
        self._lanes.setdefault(ticket.priority, {})[ticket] = None
        self.waiting += 1
        self._accounts[ticket.key].waiting += 1
        if self._shares is not None:
            self._shares.join(ticket)

    def _unqueue(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.priority]
        del lane[ticket]
        if not lane:
            del self._lanes[ticket.priority]
        self.waiting -= 1
        self._accounts[ticket.key].waiting -= 1
        if self._shares is not None:
            self._shares.leave(ticket)

    def _evict(self, ticket: Ticket, event: TicketEvent, refusal: Refusal, now: float) -> None:
        """Refuse a waiting request: it has cost nothing, and will not leave."""
        self._unqueue(ticket)
        self._correct(ticket, 0, now=now)
        self._release(ticket)
        self._refuse(ticket, event, refusal)
        self.news.append(ticket)

    def _fill(self) -> None:
        """Hand free places to waiting requests."""
        while self._lanes and self.admitted < self.limits.max_concurrency:
            shares = self._shares
            first = min(self._lanes)
            ticket = next(iter(self._lanes[first])) if shares is None else shares.next(first)
            self._unqueue(ticket)
            self._admit(ticket)
            self.news.append(ticket)

    def _correct(self, ticket: Ticket, cost: int, *, now: float) -> None:
        """Replace a request's charge on arrival by the tokens that it has cost.

        The charge is 0 if the limit is younger than the request.
        """
        limits = self.limits
        if (per_minute := limits.max_key_tokens_per_minute) is not None:
            self._accounts[ticket.key].quota.charge(
                per_minute * self.share, cost - ticket.charged, now=now
            )
        if self.shares_limits:
            note_usage(self.usage, ticket.key, 0, cost - ticket.reported)

    def _refuse(self, ticket: Ticket, event: TicketEvent, refusal: Refusal) -> None:
        ticket.on(event)
        ticket.refusal = refusal
        self.refused[refusal.limit] += 1

    def _new_account(self, key: str, *, now: float) -> _Account:
        """Return an account for a key without one, after dropping idle accounts."""
        idle = [
            name
            for name, known in self._accounts.items()
            if not known.held and known.is_idle(now=now)
        ]
        for name in idle:
            del self._accounts[name]
        if self._shares is not None:
            held = {name for name, known in self._accounts.items() if known.held}
            self._shares.forget(held)
        account = self._accounts[key] = _Account()
        return account


def _has_rates(limits: Settings) -> bool:
    """Return whether requests are charged to a rate, of requests or of tokens."""
    rates = limits.max_key_rate, limits.max_key_tokens_per_minute, limits.max_rate
    return any(rate is not None for rate in rates)


def _counts_tokens(limits: Settings) -> bool:
    return limits.queue_order is _FAIR or limits.max_key_tokens_per_minute is not None
