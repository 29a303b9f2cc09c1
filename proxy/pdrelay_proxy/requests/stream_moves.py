"""Streams that leave an engine which is drained by moving them, or has no KV room
(docs/moving-streams.md).

A stream is cut behind a token. The engine that it leaves has the KV cache of prompt and answer, so
it is the prefill engine of the rest, and another decode engine reads from it. Where it cannot be, a
prefill engine computes them. requests/resumed_stream.py makes the requests for the rest; this
module decides which streams are cut, and when, and counts what becomes of them
(requests/stream_move.py).
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from pdrelay_proxy.core.fleet.kv_relief import streams_to_move
from pdrelay_proxy.core.model import InstanceId, RequestId
from pdrelay_proxy.core.request_record import MoveOutcome, MoveReason
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.services import Services
from pdrelay_proxy.requests.stream_move import MoveOwner, RequestKind, StreamMove, StuckPrompt


class StreamMoves(MoveOwner):
    """Moves the streams of engines that are drained by it, or full, some at a time.

    Runs on the event loop.
    """

    __slots__ = (
        "_most",
        "_relief",
        "_requests",
        "_stayed",
        "_to_leave",
        "_unable",
        "_under_way",
    )

    def __init__(self, services: Services, requests: Mapping[Request, None], most: int) -> None:
        """``requests``: those under way, in the order in which they came.

        ``most``: streams that may be between two engines at the same time.
        """
        super().__init__(services)
        self._requests = requests
        self._most = most
        self._under_way = 0
        # counted as such; they end with the engines that drain
        self._stayed: set[RequestId] = set()
        # engines that have failed to hand a stream over, while they are left
        self._unable: set[InstanceId] = set()
        # the look at KV caches from which ``_to_leave`` follows
        self._relief: dict[InstanceId, float] = {}
        # how many streams should still leave an engine without KV room
        self._to_leave = Counter[InstanceId]()

    def cut_streams(self) -> None:
        """Cut the streams that may move now, as many as may move at the same time."""
        registry = self.services.fleet.registry
        if not registry.departures.moving:
            self._stayed.clear()
        if self._unable:
            self._unable.intersection_update((*registry.departures.moving, *registry.relief.shares))
        if registry.relief.shares is not self._relief:
            self._relief = registry.relief.shares
            self._to_leave = self._share_out(self._relief)
        if registry.departures.moving or self._to_leave:
            self._cut_streams(registry.departures.moving)

    def _cut_streams(self, moving: Collection[InstanceId]) -> None:
        """Cut streams of engines that drain, the oldest first; and of full engines the newest, as
        vLLM preempts.
        """
        requests = tuple(self._requests)
        # What no other engine can take is looked at once. To choose engines for each of thousands,
        # four times a second, would take all of the event loop.
        stuck = set[tuple[InstanceId, RequestKind]]()
        stuck_prompts = set[StuckPrompt]()
        for request in requests if moving else ():
            # a prompt may wait for a prefill engine for long
            request.change_slot(moving, stuck_prompts)
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
        self.services.telemetry.stream_moved(
            move.reason, move.record.outcome or MoveOutcome.FAILED, move.record.gap_s
        )
        asyncio.get_running_loop().call_soon(self.cut_streams)

    def _try(
        self,
        request: Request,
        source: InstanceId,
        reason: MoveReason,
        stuck: set[tuple[InstanceId, RequestKind]],
    ) -> bool:
        """Cut a stream if another engine can go on with it exactly, and there is one; tell whether
        it is cut.
        """
        member = self.services.fleet.registry.get(source)
        replay = request.continuation
        record = request.record
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
            # until the next look at KV caches: choosing engines costs too much
            self._to_leave.pop(source, None)
            return False
        self._under_way += 1
        hold = RequestId(f"{record.request_id}-m{len(record.moves)}")
        prompt_holder = None if record.prefill is None else record.prefill.instance
        move = StreamMove(
            self,
            member.as_stream_source(),
            lender,
            pair,
            hold,
            reason=reason,
            prompt_holder=prompt_holder,
        )
        if not request.cut(move):
            self._under_way -= 1
            move.let_go()
            return False
        return True

    def _stay(self, request: RequestId) -> None:
        if request not in self._stayed:
            self._stayed.add(request)
            self.services.telemetry.stream_moved(MoveReason.DRAIN, MoveOutcome.STAYED, None)
