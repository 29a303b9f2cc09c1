"""Streams that leave an engine which is drained by moving them, or has no KV room (docs/moving-streams.md).

A stream is cut behind a token. The engine that it leaves has the KV cache of prompt and answer, so it is the prefill
engine of the rest, and another decode engine reads from it. Where it cannot be, a prefill engine computes them.
requests/resumed_stream.py makes the requests for the rest; this module decides which streams are cut, and when, and
counts what becomes of them.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from pdrelay_proxy.core.fleet.kv_relief import streams_to_move
from pdrelay_proxy.core.model import Instance, InstanceId, RequestId
from pdrelay_proxy.core.request_record import MoveOutcome, MoveReason, MoveRecord

if TYPE_CHECKING:
    from pdrelay_proxy.requests.request import Request
    from pdrelay_proxy.requests.service import Requests


# What decides which engines can serve a request: its model, and the rank that the client wants.
RequestKind: TypeAlias = tuple[str | None, int | None]
# By the engine that is left, the prefill engine that fits others or not, the same, and the engines that failed before.
StuckPrompt: TypeAlias = tuple[InstanceId, InstanceId, str | None, int | None, frozenset[InstanceId]]
StuckPrompts: TypeAlias = set[StuckPrompt]
_SHARE_OF_LENDER: Final = 0.25  # of the time for a move


class StreamMove:
    """One stream between its cut and the first event of the engine that goes on with it."""

    __slots__ = ("_hold", "_of", "ids", "is_alone", "is_over", "lender", "met", "pair", "reason", "record", "source")

    def __init__(
        self,
        of: "Requests",
        source: Instance,
        lender: Instance | None,
        pair: tuple[Instance, Instance],
        name: RequestId,
        *,
        reason: MoveReason,
        met: InstanceId | None,
    ) -> None:
        """``pair``: the engines that are asked first; ``name``: under which the engine that it leaves is held.

        ``lender``: the engine that it leaves, as a prefill engine; ``met``: the prefill engine that has the prompt.
        """
        self._of = of
        self.reason = reason
        self._hold: RequestId | None = name
        self.source = source
        self.lender = lender  # None: it is not asked for the KV cache, or any more
        self.met = met
        self.pair: tuple[Instance, Instance] | None = pair
        self.ids: msgspec.Raw | None = None  # of a chat: its prompt and the tokens so far
        self.is_alone = False  # two engines have failed to: one computes the rest anew
        self.is_over = False
        self.record = MoveRecord(source.id, of.clock())
        of.fleet.enter(source, name)  # it is not empty while its KV cache is read

    def is_lent_by(self, prefill: Instance) -> bool:
        """Tell whether a prefill engine is the engine that the stream leaves."""
        return prefill.id == self.source.id

    def seconds_for(self, prefill: Instance) -> float:
        """Return how long a prefill engine may take for its part: one that has everything computes a block."""
        seconds = self._of.settings.move_timeout_s
        return seconds * _SHARE_OF_LENDER if self.is_lent_by(prefill) else seconds

    def handed_over(self, prefill: Instance) -> None:
        """A prefill engine has the KV cache: unless it is the engine that the stream leaves, that one is free."""
        if not self.is_lent_by(prefill):
            self.let_go()

    def lender_failed(self) -> None:
        """The engine that the stream leaves has not handed it over: prefill engines compute it, and those behind it."""
        self.lender = None
        self._of.moves.lender_failed(self.source.id)

    def let_go(self) -> None:
        """The engine that the stream leaves is not needed any more."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._of.fleet.leave(self.source, hold)

    def goes_on(self) -> None:
        """The next engine has sent its first event."""
        self.record.gap_s = self._of.clock() - self.record.cut_at
        self.end(MoveOutcome.RESUMED if self.is_alone else MoveOutcome.MOVED)

    def end(self, outcome: MoveOutcome) -> None:
        """Count what has become of it, once."""
        self.let_go()
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

    __slots__ = ("_most", "_of", "_relief", "_rounds", "_stayed", "_to_leave", "_unable", "_under_way")

    def __init__(self, of: "Requests", most: int) -> None:
        """``most``: streams that may be between two engines at the same time."""
        self._of = of
        self._most = most
        self._under_way = 0
        self._stayed: set[RequestId] = set()  # counted as such; they end with the engines that drain
        self._unable: set[InstanceId] = set()  # engines that have failed to hand a stream over, while they are left
        self._relief: dict[InstanceId, float] = {}  # the look at KV caches from which ``_to_leave`` follows
        self._to_leave = Counter[InstanceId]()  # how many streams should still leave an engine without KV room

    def look(self) -> None:
        """Cut the streams that may move now, as many as may move at the same time."""
        registry = self._of.fleet.registry
        if not registry.moving:
            self._stayed.clear()
        if self._unable:
            self._unable.intersection_update((*registry.moving, *registry.relief.shares))
        if registry.relief.shares is not self._relief:
            self._relief = registry.relief.shares
            self._to_leave = self._share_out(self._relief)
        if registry.moving or self._to_leave:
            self._look_at_all(registry.moving)

    def _look_at_all(self, moving: Collection[InstanceId]) -> None:
        """Cut streams of engines that drain, the oldest first; and of full engines the newest, as vLLM preempts."""
        requests = tuple(self._of)
        # What no other engine can take is looked at once. To choose engines for each of thousands, four times a second,
        # would take all of the event loop.
        stuck, stuck_prompts = set[tuple[InstanceId, RequestKind]](), set[StuckPrompt]()
        for request in requests if moving else ():
            request.change_slot(moving, stuck_prompts)  # a prompt may wait for a prefill engine for long
        for request in requests if moving else ():
            if self._under_way >= self._most:
                return
            source = request.streams_from
            if source is not None and source in moving:
                self._try(request, source, MoveReason.DRAIN, stuck)
        for request in reversed(requests) if self._to_leave else ():
            if self._under_way >= self._most:
                return
            source = request.streams_from
            if source is None or self._to_leave[source] <= 0:
                continue
            if self._try(request, source, MoveReason.KV_ROOM, stuck):
                self._to_leave[source] -= 1

    def _share_out(self, shares: Mapping[InstanceId, float]) -> Counter[InstanceId]:
        """Return how many of our streams should leave each engine: other routers have some there, too."""
        ours = Counter([one for request in self._of if (one := request.streams_from) is not None and one in shares])
        return Counter({source: streams_to_move(count, shares[source]) for source, count in ours.items()})

    def lender_failed(self, source: InstanceId) -> None:
        """An engine has not handed a stream over: the next ones do not wait for it."""
        self._unable.add(source)

    def ended(self, move: StreamMove) -> None:
        """A move is over: count it, and look for another."""
        self._under_way -= 1
        self._of.telemetry.stream_moved(move.reason, move.record.outcome or MoveOutcome.FAILED, move.record.gap_s)
        asyncio.get_running_loop().call_soon(self.look)

    def _try(
        self, request: "Request", source: InstanceId, reason: MoveReason, stuck: set[tuple[InstanceId, RequestKind]]
    ) -> bool:
        """Cut a stream if another engine can go on with it exactly, and there is one; tell whether it is cut."""
        member, replay, record = self._of.fleet.registry.get(source), request.continuation, request.record
        if member is None:
            return False
        if replay is None or request.looks_back:
            if reason is MoveReason.DRAIN:
                self._stay(record.request_id)
            return False
        kind = source, request.kind
        if kind in stuck or not replay.can_move():
            return False
        if source in [move.source for move in record.moves]:  # it has come back: it ends here
            return False
        lender = None if source in self._unable else member.as_lender()
        pair = request.pair_for_move(source, lender)
        if pair is None:
            stuck.add(kind)
            self._to_leave.pop(source, None)  # until the next look at KV caches: choosing engines costs too much
            return False
        self._under_way += 1
        hold = RequestId(f"{record.request_id}-m{len(record.moves)}")
        met = None if record.prefill is None else record.prefill.instance
        move = StreamMove(self._of, member.as_home(), lender, pair, hold, reason=reason, met=met)
        if not request.cut(move):
            self._under_way -= 1
            move.let_go()
            return False
        return True

    def _stay(self, request: RequestId) -> None:
        if request not in self._stayed:
            self._stayed.add(request)
            self._of.telemetry.stream_moved(MoveReason.DRAIN, MoveOutcome.STAYED, None)
