"""A request with several prompts, while it is served: a request of its own for each, some of them
at a time.

Each part is routed, tried again and resumed like any other request, and two of them may go to
different engines. What one of them fails with is what all of them fail with; the others are dropped
then.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.ticket import Ticket
from pdrelay_proxy.core.http.bounded_body import ANSWER_MOST
from pdrelay_proxy.core.model import GenerationRequest, InstanceId, LegOrder, Role
from pdrelay_proxy.core.protocol.engine_errors import words_of
from pdrelay_proxy.core.request_record import PromptParts, PromptRecord
from pdrelay_proxy.core.routing.routing_hints import hints_of_call
from pdrelay_proxy.errors import (
    AnswerRefused,
    BadRequest,
    EngineError,
    NoInstance,
    ProxyError,
    Refused,
    RouterFull,
    forget_frames,
)
from pdrelay_proxy.features.prompt_arrays.core.prompt_arrays import (
    MergedAnswer,
    MergedStream,
    choices_of,
    one_of,
)
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.requests.attempt import Attempt
from pdrelay_proxy.requests.claims import ClaimedAnswer, NewPart, PartRequest
from pdrelay_proxy.requests.client_response import ClientGone, ClientResponse
from pdrelay_proxy.requests.intake import JSON_TYPE, RequestPlan
from pdrelay_proxy.requests.life import RequestLife

# parts of one array that are under way: other clients' requests shall not wait behind them
AT_ONCE_AT_LEAST: Final = 16
AT_ONCE_AT_MOST: Final = 64
AT_ONCE_EACH_ENGINE: Final = 8
_OK: Final = 200
_CLIENTS_FAULT: Final = range(400, 500)


def parts_at_once(fleet: LiveFleet) -> int:
    """Return how many parts of one array may be under way: by the role that has fewer engines."""
    try:
        engines = min(len(fleet.usable(Role.PREFILL)), len(fleet.usable(Role.DECODE)))
    except NoInstance:
        engines = 0
    return min(max(AT_ONCE_AT_LEAST, engines * AT_ONCE_EACH_ENGINE), AT_ONCE_AT_MOST)


class PromptArray(ClaimedAnswer):
    """The parts of one request, and what has come of them."""

    __slots__ = (
        "_at_once",
        "_begun",
        "_call",
        "_client",
        "_failure",
        "_held",
        "_left",
        "_life",
        "_new_part",
        "_parts",
        "_pieces",
        "_places",
        "_plan",
        "_prompts",
        "_size",
        "_stream",
        "_ticket",
        "_whole",
    )

    def __init__(
        self,
        life: RequestLife,
        client: ClientResponse,
        plan: RequestPlan,
        call: GenerationRequest,
        ticket: Ticket,
        *,
        prompts: Sequence[msgspec.Raw],
        new_part: NewPart,
    ) -> None:
        """``ticket``: of the whole request; ``new_part``: makes the request for one prompt."""
        # the answer's id; choices of each prompt
        name = f"cmpl-{life.record.request_id}"
        n = choices_of(call.fields)
        life.record.push = LegOrder.EACH_PROMPT
        self._life = life  # woken when there is news
        self._at_once = parts_at_once(life.services.fleet)
        self._client = client
        self._plan = plan
        self._call = call
        self._prompts = prompts
        self._ticket = ticket
        # of parts under way, but for one, which is served at that of the whole
        self._places: list[Ticket] = []
        self._new_part = new_part
        self._parts: dict[int, PartRequest] = {}  # by place: those under way
        self._begun = 0  # parts that were begun
        self._left = len(prompts)  # parts that have no whole answer
        self._failure: Exception | None = None  # of the first part that has failed
        self._held = 0  # bytes of the answers that are charged
        self._size = 0  # bytes of the answers that are no streams
        self._pieces: list[bytes] = []  # of the stream, not written yet
        self._whole = MergedAnswer(name, n)
        self._stream = MergedStream(name, n)

    # ---- for the request that has the prompts

    async def answer(self) -> None:
        """Serve each of the prompts by itself, and give the client one answer.

        Raises:
            ProxyError: the error for the client.
        """
        try:
            await self._serve_all()
            if self._plan.streams:
                self._client.end_events(self._stream.end())
            else:
                self._client.write_whole(JSON_TYPE, self._whole.whole())
        finally:
            self._free()

    async def _serve_all(self) -> None:
        """Serve each of the prompts, and write what comes of streams."""
        try:
            while True:
                self._begin_more()
                if self._pieces:
                    pieces = self._pieces
                    self._pieces = []
                    self._client.write_events(b"".join(pieces))
                if not self._left:
                    break
                await self._life
        except Refused as refused:
            raise error_in_stream(refused) if self._client.writer.begun else refused from None
        finally:
            self._drop()

    def _free(self) -> None:
        """Give back the bytes of answers that are kept no more."""
        if self._held:
            self._life.services.gate.free(self._held)
            self._held = 0

    def _begin_more(self) -> None:
        """Begin as many parts as may be under way; raises what one of them has failed with."""
        while self._failure is None and self._begun < len(self._prompts) and self._has_place():
            place = self._begun
            plan = self._plan
            call = self._call
            fields = one_of(call.fields, self._prompts[place])
            own = call.with_fields(fields)
            hints = hints_of_call(own, plan.hints.session, plan.hints.model)
            own_plan = RequestPlan(plan.path, plan.headers, hints, plan.priority, call=own)
            self._begun += 1
            part = self._parts[place] = self._new_part(_PartWriter(self, place), own_plan, place)
            if self._client.is_paused:
                part.pause()
            part.serve()
        if self._failure is not None:
            raise forget_frames(self._failure)

    def _has_place(self) -> bool:
        """Take a place for one more part, if there may be one: the first one under way has that of
        the whole.
        """
        if len(self._parts) >= self._at_once:
            return False
        if not self._parts:
            return True
        place = self._life.services.gate.admission.grant_extra_place(self._ticket)
        if place is None:
            return False
        self._places.append(place)
        return True

    def _leave_places(self, kept: int) -> None:
        """Give back the places that are too many for so many parts under way."""
        while len(self._places) > max(0, kept - 1):
            self._life.services.gate.leave(self._places.pop(), 0)

    def _drop(self) -> None:
        """End the parts that are under way."""
        parts = tuple(self._parts.values())
        self._parts = {}
        for part in parts:
            part.interrupt(ClientGone())
            self._note(part)
        self._leave_places(0)

    def _note(self, part: PartRequest) -> None:
        """Keep what happened to a part that is over, where the whole request is kept."""
        record = part.record
        own = self._life.record
        if own.parts is None:
            own.parts = PromptParts()
        if isinstance(record, PromptRecord):
            own.parts.add(record)

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        return [engine for part in self._parts.values() for engine in part.engines]

    @property
    def attempts(self) -> Sequence[Attempt]:
        """List the tries that are under way."""
        return [attempt for part in self._parts.values() for attempt in part.attempts]

    def pause(self) -> None:
        """Have the engines wait: the client is slow."""
        for part in self._parts.values():
            part.pause()

    def resume(self) -> None:
        """Go on."""
        for part in self._parts.values():
            part.resume()

    def check_deadlines(self, now: float, /) -> None:
        """Fail each leg that has taken too long, and begin more parts: other requests may have left
        places.
        """
        for part in tuple(self._parts.values()):
            part.check_deadlines(now)
        if self._begun < len(self._prompts) and len(self._parts) < self._at_once:
            self._life.wake()

    # ---- for the parts

    def answered(self, place: int, body: bytes) -> None:
        """The prompt at a place has its whole answer."""
        self._size += len(body)
        if self._plan.streams:
            self._fail(EngineError("an engine answered with something that is no stream"))
        elif self._size > ANSWER_MOST:
            self._fail(
                AnswerRefused(f"the answers to all prompts have more than {ANSWER_MOST} bytes")
            )
        else:
            try:
                self._life.services.gate.hold(len(body))
            except RouterFull as full:
                self._fail(forget_frames(full))
            else:
                self._held += len(body)
                self._whole.take(place, body)

    def streamed(self, place: int, lines: bytes) -> None:
        """Some lines of the stream for the prompt at a place are here."""
        if self._failure is not None or place not in self._parts:
            return
        if not self._plan.streams:
            self._fail(EngineError("an engine answered with a stream that was not asked for"))
        else:
            try:
                piece = self._stream.feed(place, lines)
            except EngineError as error:
                self._fail(forget_frames(error))
            else:
                if not piece:
                    return
                self._pieces.append(piece)
        self._life.wake()  # last: what goes on from here may end the part

    def part_over(self, place: int, rest: bytes) -> None:
        """A part is over; ``rest``: the last lines of its stream."""
        part = self._parts.get(place)
        if part is None:
            return  # it was dropped
        self._note(part)
        if part.failure is not None:
            self._fail(part.failure)
        elif rest:
            self.streamed(place, rest)
        self._parts.pop(place, None)
        self._leave_places(len(self._parts))
        self._left -= 1
        self._life.wake()

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error


class _PartWriter:
    """Implements ResponseWriter for one part."""

    __slots__ = ("_array", "_place", "_rest", "begun", "keep_alive")

    def __init__(self, array: PromptArray, place: int) -> None:
        self._array = array
        self._place = place
        self._rest = b""
        self.begun = False
        self.keep_alive = True

    def begin(
        self,
        status: int,
        lines: bytes,  # noqa: ARG002
        body: bytes,
        *,
        streams: bool,
        last: bool = False,  # noqa: ARG002
    ) -> None:
        """Take a whole answer, or the beginning of a stream; what is neither is told by
        ``part_over``.
        """
        self.begun = True
        if streams:
            self._array.streamed(self._place, body)
        elif status == _OK:
            self._array.answered(self._place, body)

    @property
    def relay(self) -> Callable[[bytes], object] | None:
        """There are no chunks here."""
        return None

    def write(self, piece: bytes, /) -> None:
        """Take a piece of a stream."""
        self._array.streamed(self._place, piece)

    def end(self, piece: bytes = b"", /) -> None:
        """Keep the last piece of a stream: it may be the error that the part has ended with."""
        self._rest = piece

    def close(self) -> None:
        """The part is over."""
        self._array.part_over(self._place, self._rest)


def error_in_stream(refused: Refused) -> ProxyError:
    """Return the error for a refusal whose status comes too late: the stream has begun."""
    words = words_of(refused.body) or str(refused)
    return BadRequest(words) if refused.status in _CLIENTS_FAULT else EngineError(words)
