"""One try of a request: what both legs have in common, and everything that must be closed when it is over."""

from dataclasses import replace

import msgspec

from xpyd_proxy.core.admission import Ticket
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Ask, Call, Handover, Headers, Instance, Leg, RequestId, Role, TransferId
from xpyd_proxy.core.retries import Chances, LegFailed
from xpyd_proxy.core.rules import Patience
from xpyd_proxy.core.usage import Comparison
from xpyd_proxy.errors import OutOfTime
from xpyd_proxy.relay.opened import Opened

_RANK = b"x-data-parallel-rank"


class Outline(msgspec.Struct, frozen=True):
    """What a request is to the engines, whatever it asks them for."""

    path: str
    headers: Headers
    ask: Ask
    streams: bool = False
    content_type: bytes = b"application/json"
    since: float | None = None  # when its time began, on the event loop's clock; None: with its first leg


class Attempt(msgspec.Struct, frozen=True):
    """One try: everything it opens is on its stack, and both legs carry its ids."""

    of: Outline
    journey: Journey
    chances: Chances
    patience: Patience
    ends_at: float | None  # of a stream, on the event loop's clock
    request: RequestId
    transfer: TransferId  # what both engines call the transfer, if the prefill engine pushes
    opened: Opened = msgspec.field(default_factory=Opened)
    counted: Comparison = msgspec.field(default_factory=Comparison)

    @property
    def ask(self) -> Ask:
        """What the choice of engines may depend on."""
        return replace(self.of.ask, again=True) if self.chances.avoided else self.of.ask

    def leg(self, instance: Instance, body: bytes, path: str | None = None) -> Leg:
        """Both legs carry the same fresh id: engines match their halves of a request by it."""
        headers = (*self.of.headers, (b"x-request-id", self.request.encode()))
        rank = instance.rank if instance.rank is not None or instance.role is Role.PREFILL else self.of.ask.rank
        if rank is not None:
            headers = (*headers, (_RANK, str(rank).encode()))
        return Leg(instance, path or self.of.path, body, headers, self.of.content_type)


class Loan(msgspec.Struct):
    """Blocks that a prefill engine keeps for a decode engine, until that one has asked for them."""

    prefill: Instance
    due: float | None = None  # from then on they may be another request's; None: there are none yet
    taken: bool = False

    def take(self) -> None:
        """The decode leg is on its way: whatever becomes of it, the engines settle it between them."""
        self.taken = True


class Stop(msgspec.Struct, frozen=True):
    """How far the first try of a request has come on the short way (relay/ride.py), which the relay goes on from."""

    prefill: Instance
    decode: Instance
    error: LegFailed | OutOfTime  # what has ended it
    handover: Handover | None = None  # what the prefill leg was good for; None: that is the leg that failed
    due: float | None = None  # when it is too late for the decode leg
    sent: bool = False  # the decode engine may have the decode leg


class Left(msgspec.Struct, frozen=True):
    """A request that cannot go on the short way."""

    call: Call
    attempt: Attempt
    stop: Stop
    ticket: Ticket
