"""Streams that leave an engine which is drained by moving them, or has no KV room
(docs/moving-streams.md).

A stream is cut behind a token. The engine that it leaves has the KV cache of prompt and answer, so
it is the prefill engine of the rest, and another decode engine reads from it. Where it cannot be, a
prefill engine computes them. requests/resumed_stream.py makes the requests for the rest; this
module decides which streams are cut, and when, and counts what becomes of them (stream_move.py).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from pdrelay_proxy.core.model import InstanceId, RequestId
from pdrelay_proxy.core.request_record import MoveOutcome, MoveReason
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief, streams_to_move
from pdrelay_proxy.features.moving_streams.core.stream_engines import as_lender, as_stream_source
from pdrelay_proxy.features.moving_streams.requests.move_terms import MoveTakeover, pair_for_move
from pdrelay_proxy.features.moving_streams.requests.slot_change import StuckPrompt, change_slot
from pdrelay_proxy.features.moving_streams.requests.stream_move import MoveOwner, StreamMove
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet

_AT_ONCE: Final = 8
# Is told of each stream that has moved, so many seconds after it was cut; or that has not.
CountMove: TypeAlias = Callable[[MoveReason, MoveOutcome, float | None], None]
# The engine that a stream leaves, and what decides which engines can serve its request: the model,
# and the rank that the client wants.
StuckStream: TypeAlias = tuple[InstanceId, str | None, int | None]


class StreamMoves(MoveOwner):
    """Moves the streams of engines that are drained by it, or full, some at a time.

    Runs on the event loop.
    """

    __slots__ = (
        "_count",
        "_most",
        "_requests",
        "_shares",
        "_stayed",
        "_to_leave",
        "_unable",
        "_under_way",
    )

    def __init__(
        self, relief: KvRelief, count: CountMove, requests: RequestSet, *, most: int = _AT_ONCE
    ) -> None:
        """``relief``: which engines have no KV room; ``requests``: those under way.

        ``most``: streams that may be between two engines at the same time.
        """
        super().__init__(relief, requests.services)
        self._count = count
        self._requests = requests
        self._most = most
        self._under_way = 0
        # counted as such; they end with the engines that drain
        self._stayed: set[RequestId] = set()
        # engines that have failed to hand a stream over, while they are left
        self._unable: set[InstanceId] = set()
        # the look at KV caches from which ``_to_leave`` follows
        self._shares: dict[InstanceId, float] = {}
        # how many streams should still leave an engine without KV room
        self._to_leave = Counter[InstanceId]()

    def check_requests(self) -> None:
        """Cut streams: what has changed since the last look may let some move."""
        self.cut_streams()

    def cut_streams(self) -> None:
        """Cut the streams that may move now, as many as may move at the same time."""
        registry = self.services.fleet.registry
        if not registry.departures.moving:
            self._stayed.clear()
        if self._unable:
            self._unable.intersection_update((*registry.departures.moving, *self.relief.shares))
        if self.relief.shares is not self._shares:
            self._shares = self.relief.shares
            self._to_leave = self._share_out(self._shares)
        if registry.departures.moving or self._to_leave:
            self._cut_streams(registry.departures.moving)

    def _cut_streams(self, moving: Collection[InstanceId]) -> None:
        """Cut streams of engines that drain, the oldest first; and of full engines the newest, as
        vLLM preempts.
        """
        requests = tuple(self._requests)
        # What no other engine can take is looked at once. To choose engines for each of thousands,
        # four times a second, would take all of the event loop.
        stuck = set[StuckStream]()
        stuck_prompts = set[StuckPrompt]()
        for request in requests if moving else ():
            for attempt in request.attempts:  # a prompt may wait for a prefill engine for long
                change_slot(attempt, moving, stuck_prompts)
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
        """Return how many of our streams should leave each engine: other routers have some there,
        too.
        """
        sources = [request.streams_from for request in self._requests]
        ours = Counter([source for source in sources if source is not None and source in shares])
        return Counter(
            {source: streams_to_move(count, shares[source]) for source, count in ours.items()}
        )

    def lender_failed(self, source: InstanceId, /) -> None:
        """An engine has not handed a stream over: the next ones do not wait for it."""
        self._unable.add(source)

    def ended(self, move: StreamMove, /) -> None:
        """A move is over: count it, and look for another."""
        self._under_way -= 1
        self._count(move.reason, move.record.outcome or MoveOutcome.FAILED, move.record.gap_s)
        asyncio.get_running_loop().call_soon(self.cut_streams)

    def _try(
        self,
        request: Request,
        source: InstanceId,
        reason: MoveReason,
        stuck: set[StuckStream],
    ) -> bool:
        """Cut a stream if another engine can go on with it exactly, and there is one; tell whether
        it is cut.
        """
        fleet = self.services.fleet
        member = fleet.registry.get(source)
        replay = request.continuation
        record = request.record
        hints = request.hints
        if member is None or hints is None:
            return False
        if replay is None or request.looks_back:
            if reason is MoveReason.DRAIN:
                self._stay(record.request_id)
            return False
        kind = source, hints.model, hints.rank
        if kind in stuck or not replay.can_move():
            return False
        # it has come back: it ends here
        if source in [move.source for move in record.moves]:
            return False
        lender = None if source in self._unable else as_lender(member)
        prompt_holder = None if record.prefill is None else record.prefill.instance
        full = self.relief.full()
        others = RetryAttempts(0, {source, *full})
        try:
            pair = pair_for_move(
                fleet,
                hints,
                others,
                lender,
                files=member.facts.files_of(hints.model),
                prompt_holder=prompt_holder,
                full=full,
            )
        except ProxyError:
            stuck.add(kind)
            # until the next look at KV caches: choosing engines costs too much
            self._to_leave.pop(source, None)
            return False
        self._under_way += 1
        hold = RequestId(f"{record.request_id}-m{len(record.moves)}")
        move = StreamMove(
            self,
            as_stream_source(member),
            lender,
            pair,
            hold,
            reason=reason,
            prompt_holder=prompt_holder,
        )
        if not request.cut(MoveTakeover(move)):
            self._under_way -= 1
            move.let_go()
            return False
        return True

    def _stay(self, request: RequestId) -> None:
        if request not in self._stayed:
            self._stayed.add(request)
            self._count(MoveReason.DRAIN, MoveOutcome.STAYED, None)
