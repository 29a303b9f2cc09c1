"""Streams that leave an engine which is drained by moving them, or has no KV room (docs/moving-streams.md).

A stream is cut behind a token. Two other engines go on with it: the prefill engine reads the KV cache of prompt and
answer from the engine that it leaves, and hands it over. requests/resumed_stream.py makes the requests for the rest;
this module decides which streams are cut, and when, and counts what becomes of them.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from xpyd_proxy.core.model import Instance, InstanceId, RequestId
from xpyd_proxy.core.protocol.returned_kv import CachedOn
from xpyd_proxy.core.request_record import MoveOutcome, MoveReason, MoveRecord

if TYPE_CHECKING:
    from xpyd_proxy.requests.request import Request
    from xpyd_proxy.requests.service import Requests


_ROUNDING: Final = 1e-9  # a fifth of five streams is one


class StreamMove:
    """One stream between its cut and the first event of the engine that goes on with it."""

    __slots__ = ("_hold", "_of", "cached_on", "ids", "is_alone", "is_over", "pair", "reason", "record", "source")

    def __init__(
        self,
        of: "Requests",
        source: Instance,
        cached_on: CachedOn,
        pair: tuple[Instance, Instance],
        name: RequestId,
        *,
        reason: MoveReason,
    ) -> None:
        """``pair``: the engines that are asked first; ``name``: under which the engine that it leaves is held."""
        self._of = of
        self.reason = reason
        self._hold: RequestId | None = name
        self.source = source
        self.cached_on = cached_on
        self.pair: tuple[Instance, Instance] | None = pair
        self.ids: msgspec.Raw | None = None  # of a chat: its prompt and the tokens so far
        self.is_alone = False  # two engines have failed to: one computes the rest anew
        self.is_over = False
        self.record = MoveRecord(source.id, of.clock())
        of.fleet.enter(source, name)  # it is not empty while its KV cache is read

    def handed_over(self) -> None:
        """The KV cache is elsewhere: the engine that drains is not needed any more."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._of.fleet.leave(self.source, hold)

    def goes_on(self) -> None:
        """The next engine has sent its first event."""
        self.record.gap_s = self._of.clock() - self.record.cut_at
        self.end(MoveOutcome.RESUMED if self.is_alone else MoveOutcome.MOVED)

    def end(self, outcome: MoveOutcome) -> None:
        """Count what has become of it, once."""
        self.handed_over()
        if not self.is_over:
            self.is_over = True
            self.record.outcome = outcome
            self._of.moves.ended(self)


class StreamCut(Exception):
    """A stream is cut here, to go on at another engine."""

    def __init__(self, move: StreamMove) -> None:
        super().__init__(f"the stream leaves {move.source.id}")
        self.move = move


class StreamMoves:
    """Moves the streams of engines that are drained by it, or full, some at a time. Runs on the event loop."""

    __slots__ = ("_of", "_relief", "_stayed", "_to_leave", "_under_way")

    def __init__(self, of: "Requests") -> None:
        self._of = of
        self._under_way = 0
        self._stayed: set[RequestId] = set()  # counted as such; they end with the engines that drain
        self._relief: dict[InstanceId, float] = {}  # the look at KV caches from which ``_to_leave`` follows
        self._to_leave = Counter[InstanceId]()  # how many streams should still leave an engine without KV room

    def look(self) -> None:
        """Cut the streams that may move now, as many as the settings let."""
        registry = self._of.fleet.registry
        if not registry.moving:
            self._stayed.clear()
        if registry.relief.shares is not self._relief:
            self._relief = registry.relief.shares
            self._to_leave = self._share_out(self._relief)
        if registry.moving or self._to_leave:
            self._look_at_all(registry.moving)

    def _look_at_all(self, moving: Collection[InstanceId]) -> None:
        """Cut streams of engines that drain, the oldest first; and of full engines the newest, as vLLM preempts."""
        requests, most = tuple(self._of), self._of.settings.move_concurrency
        for request in requests if moving else ():
            if self._under_way >= most:
                return
            source = request.streams_from
            if source is not None and source in moving:
                self._try(request, source, MoveReason.DRAIN)
        for request in reversed(requests) if self._to_leave else ():
            if self._under_way >= most:
                return
            source = request.streams_from
            if source is not None and self._to_leave[source] > 0 and self._try(request, source, MoveReason.KV_ROOM):
                self._to_leave[source] -= 1

    def _share_out(self, shares: Mapping[InstanceId, float]) -> Counter[InstanceId]:
        """Return how many of our streams should leave each engine: other routers have streams there as well."""
        ours = Counter([one for request in self._of if (one := request.streams_from) is not None and one in shares])
        return Counter({source: math.ceil(count * shares[source] - _ROUNDING) for source, count in ours.items()})

    def ended(self, move: StreamMove) -> None:
        """A move is over: count it, and look for another."""
        self._under_way -= 1
        self._of.telemetry.stream_moved(move.reason, move.record.outcome or MoveOutcome.FAILED, move.record.gap_s)
        asyncio.get_running_loop().call_soon(self.look)

    def _try(self, request: "Request", source: InstanceId, reason: MoveReason) -> bool:
        """Cut a stream if another engine can go on with it exactly, and there is one; tell whether it is cut."""
        member, replay, record = self._of.fleet.registry.get(source), request.continuation, request.record
        if member is None:
            return False
        engine_id = member.facts.engine_id
        if replay is None or engine_id is None or member.instance.rank is not None:
            if reason is MoveReason.DRAIN:
                self._stay(record.request_id)
            return False
        if not replay.can_move() or source in [move.source for move in record.moves]:  # it has come back: it ends here
            return False
        pair = request.pair_for_move(source)
        if pair is None:
            self._to_leave.pop(source, None)  # until the next look at KV caches: choosing engines costs too much
            return False
        self._under_way += 1
        hold = RequestId(f"{record.request_id}-m{len(record.moves)}")
        move = StreamMove(self._of, member.instance, CachedOn(engine_id, 1.0), pair, hold, reason=reason)
        if not request.cut(move):
            self._under_way -= 1
            move.handed_over()
            return False
        return True

    def _stay(self, request: RequestId) -> None:
        if request not in self._stayed:
            self._stayed.add(request)
            self._of.telemetry.stream_moved(MoveReason.DRAIN, MoveOutcome.STAYED, None)
