"""A request with several prompts, while it is served: a request of its own for each, some of them at a time.

Each part is routed, tried again and resumed like any other request, and two of them may go to different engines. What
one of them fails with is what all of them fail with; the others are dropped then.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from xpyd_proxy.core.http.bounded_body import ANSWER_MOST
from xpyd_proxy.core.model import GenerationRequest, InstanceId
from xpyd_proxy.core.protocol.prompt_arrays import MergedAnswer, MergedStream, one_of, words_of
from xpyd_proxy.core.routing.routing_hints import ask_of_call
from xpyd_proxy.errors import BadRequest, EngineError, ProxyError, Refused
from xpyd_proxy.requests.intake import RequestPlan
from xpyd_proxy.requests.response import ResponseWriter

AT_ONCE: Final = 64  # parts of one array that are under way: it shall not fill the queues of all engines
_OK: Final = 200
_CLIENTS_FAULT: Final = range(400, 500)


class PromptRequest(Protocol):
    """One request of the array (requests/request.py)."""

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        ...

    @property
    def failure(self) -> Exception | None:
        """What its client was to be told went wrong, once it is over; None: nothing did."""
        ...

    def begin(self) -> None:
        """Serve it."""
        ...

    def pause(self) -> None:
        """Have the engine wait."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def interrupt(self, error: Exception, /) -> None:
        """End it."""
        ...

    def look(self, now: float, /) -> None:
        """See whether something has taken too long."""
        ...


NewRequest: TypeAlias = Callable[[ResponseWriter, RequestPlan, int], PromptRequest]  # for the prompt at a place


class PromptArray:
    """The parts of one request, and what has come of them; ``wake`` is called when there is news."""

    __slots__ = (
        "_begun",
        "_call",
        "_fault",
        "_left",
        "_new",
        "_parts",
        "_paused",
        "_pieces",
        "_plan",
        "_prompts",
        "_size",
        "_stream",
        "_wake",
        "_whole",
    )

    def __init__(
        self,
        plan: RequestPlan,
        call: GenerationRequest,
        prompts: Sequence[msgspec.Raw],
        *,
        name: str,
        n: int,
        new: NewRequest,
        wake: Callable[[], None],
    ) -> None:
        """``name``: the id of the answer; ``n``: the choices of each prompt."""
        self._plan = plan
        self._call = call
        self._prompts = prompts
        self._new = new
        self._wake = wake
        self._parts: dict[int, PromptRequest] = {}  # by place: those under way
        self._begun = 0  # parts that were begun
        self._left = len(prompts)  # parts that have no whole answer
        self._paused = False
        self._fault: Exception | None = None
        self._size = 0  # bytes of the answers that are no streams
        self._pieces: list[bytes] = []  # of the stream, not shown yet
        self._whole = MergedAnswer(name, n)
        self._stream = MergedStream(name, n)

    # ---- for the request that has the prompts

    @property
    def is_over(self) -> bool:
        """Tell whether each part has its whole answer."""
        return not self._left

    @property
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""
        return [engine for part in self._parts.values() for engine in part.engines]

    def begin_more(self) -> None:
        """Begin as many parts as may be under way; raises what one of them has failed with."""
        while self._fault is None and self._begun < len(self._prompts) and len(self._parts) < AT_ONCE:
            place, plan, call = self._begun, self._plan, self._call
            fields = one_of(call.fields, self._prompts[place])
            own = GenerationRequest(call.api, fields, call.headers, call.rank)
            asked = RequestPlan(plan.path, plan.headers, ask_of_call(own, plan.ask.session), plan.priority, call=own)
            self._begun += 1
            part = self._parts[place] = self._new(_PartWriter(self, place), asked, place)
            if self._paused:
                part.pause()
            part.begin()
        if self._fault is not None:
            raise self._fault.with_traceback(None)

    def take(self) -> bytes:
        """Return what of the stream the client has not got."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def whole(self) -> bytes:
        """Return the whole answer; raises EngineError: there is none to be made of what the engines say."""
        return self._whole.whole()

    def end(self) -> bytes:
        """Return the end of the stream."""
        return self._stream.end()

    def pause(self) -> None:
        """Have the engines wait: the client is slow."""
        self._paused = True
        for part in self._parts.values():
            part.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        for part in self._parts.values():
            part.resume()

    def look(self, now: float) -> None:
        """See whether some leg has taken too long."""
        for part in tuple(self._parts.values()):
            part.look(now)

    def drop(self, error: Exception) -> None:
        """End what is under way."""
        parts, self._parts = tuple(self._parts.values()), {}
        for part in parts:
            part.interrupt(error)

    # ---- for the parts

    def answered(self, place: int, body: bytes) -> None:
        """The prompt at a place has its whole answer."""
        self._size += len(body)
        if self._plan.streams:
            self._fail(EngineError("an engine answered with something that is no stream"))
        elif self._size > ANSWER_MOST:
            self._fail(EngineError(f"the answers to all prompts have more than {ANSWER_MOST} bytes"))
        else:
            self._whole.take(place, body)

    def streamed(self, place: int, lines: bytes) -> None:
        """Some lines of the stream for the prompt at a place are here."""
        if self._fault is not None or place not in self._parts:
            return
        if not self._plan.streams:
            self._fail(EngineError("an engine answered with a stream that was not asked for"))
        else:
            try:
                piece = self._stream.feed(place, lines)
            except EngineError as error:
                self._fail(error.with_traceback(None))
            else:
                if not piece:
                    return
                self._pieces.append(piece)
        self._wake()  # last: what goes on from here may end the part

    def part_over(self, place: int, rest: bytes) -> None:
        """A part is over; ``rest``: the last lines of its stream."""
        part = self._parts.get(place)
        if part is None:
            return  # it was dropped
        if part.failure is not None:
            self._fail(part.failure)
        elif rest:
            self.streamed(place, rest)
        self._parts.pop(place, None)
        self._left -= 1
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._fault is None:
            self._fault = error


class _PartWriter:
    """Implements ResponseWriter for one part."""

    __slots__ = ("_array", "_place", "_rest", "begun", "keep_alive")

    def __init__(self, array: PromptArray, place: int) -> None:
        self._array = array
        self._place = place
        self._rest = b""
        self.begun = False
        self.keep_alive = True

    def begin(self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False) -> None:  # noqa: ARG002
        """Take a whole answer, or the beginning of a stream; what is neither is told by ``part_over``."""
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


def told_in_stream(refused: Refused) -> ProxyError:
    """Return what a client is told of a refusal whose status comes too late: the stream has begun."""
    words = words_of(refused.body) or str(refused)
    return BadRequest(words) if refused.status in _CLIENTS_FAULT else EngineError(words)
