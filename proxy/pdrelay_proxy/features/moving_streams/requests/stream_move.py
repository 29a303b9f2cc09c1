"""One stream that moves to another engine: what its request and those that look after all moves
know of it.

stream_moves.py decides which streams are cut, and when.
"""

from abc import abstractmethod
from collections.abc import Set
from typing import Final

from pdrelay_proxy.core.model import Instance, InstanceId, RequestId
from pdrelay_proxy.core.request_record import MoveOutcome, MoveReason, MoveRecord
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief
from pdrelay_proxy.requests.request_set import RequestWatcher
from pdrelay_proxy.requests.services import Services
from pdrelay_proxy.settings import Settings

# of the longest pause of a stream: there are three parts, and some are tried again
_SHARE_OF_PAUSE: Final = 1 / 8
_SHARE_OF_LENDER: Final = 0.25  # of the time for a move


def move_timeout(settings: Settings) -> float:
    """Return how many seconds an engine has for its part in moving a stream."""
    return settings.stream_idle_timeout_s * _SHARE_OF_PAUSE


class MoveOwner(RequestWatcher):
    """What a move belongs to, and tells what becomes of it.

    A class, because a compiled call of a Protocol is slow.
    """

    __slots__ = ("relief", "services")

    def __init__(self, relief: KvRelief, services: Services) -> None:
        """``relief``: which engines have no KV room."""
        self.relief = relief
        self.services = services

    @property
    def moves_streams(self) -> bool:
        """It does."""
        return True

    @abstractmethod
    def lender_failed(self, source: InstanceId, /) -> None:
        """An engine has not handed a stream over: the next ones do not wait for it."""

    @abstractmethod
    def ended(self, move: "StreamMove", /) -> None:
        """A move is over."""


class StreamMove:
    """One stream between its cut and the first event of the engine that goes on with it."""

    __slots__ = (
        "_hold",
        "_owner",
        "_services",
        "is_alone",
        "is_over",
        "lender",
        "pair",
        "prompt_holder",
        "reason",
        "record",
        "source",
    )

    def __init__(
        self,
        owner: MoveOwner,
        source: Instance,
        lender: Instance | None,
        pair: tuple[Instance, Instance],
        name: RequestId,
        *,
        reason: MoveReason,
        prompt_holder: InstanceId | None,
    ) -> None:
        """``pair``: the engines that are asked first; ``name``: under which the engine that it
        leaves is held.

        ``lender``: the engine that it leaves, as a prefill engine; ``prompt_holder``: the prefill
        engine that has the prompt.
        """
        services = owner.services
        self._owner = owner
        self._services = services
        self.reason = reason
        self._hold: RequestId | None = name
        self.source = source
        self.lender = lender  # None: it is not asked for the KV cache, or any more
        self.prompt_holder = prompt_holder
        self.pair: tuple[Instance, Instance] | None = pair
        self.is_alone = False  # two engines have failed to: one computes the rest anew
        self.is_over = False
        self.record = MoveRecord(source.id, services.clock())
        services.fleet.enter(source, name)  # it is not empty while its KV cache is read

    def full_engines(self) -> Set[InstanceId]:
        """Return the engines without KV room: no stream goes there."""
        return self._owner.relief.full()

    def is_lent_by(self, prefill: Instance) -> bool:
        """Tell whether a prefill engine is the engine that the stream leaves."""
        return prefill.id == self.source.id

    def seconds_for(self, prefill: Instance) -> float:
        """Return how long a prefill engine may take for its part: one that has everything computes
        a block.
        """
        seconds = move_timeout(self._services.settings.current)
        return seconds * _SHARE_OF_LENDER if self.is_lent_by(prefill) else seconds

    def handed_over(self, prefill: Instance) -> None:
        """A prefill engine has the KV cache: unless it is the engine that the stream leaves, that
        one is free.
        """
        if not self.is_lent_by(prefill):
            self.let_go()

    def lender_failed(self) -> None:
        """The engine that the stream leaves has not handed it over: prefill engines compute it, and
        those behind it.
        """
        self.lender = None
        self._owner.lender_failed(self.source.id)

    def let_go(self) -> None:
        """The engine that the stream leaves is not needed any more."""
        hold = self._hold
        self._hold = None
        if hold is not None:
            self._services.fleet.leave(self.source, hold)

    def goes_on(self) -> None:
        """The next engine has sent its first event."""
        self.record.gap_s = self._services.clock() - self.record.cut_at
        self.end(MoveOutcome.RESUMED if self.is_alone else MoveOutcome.MOVED)

    def end(self, outcome: MoveOutcome) -> None:
        """Count what has become of it, once."""
        self.let_go()
        if not self.is_over:
            self.is_over = True
            self.record.outcome = outcome
            self._owner.ended(self)
