"""The two legs of a request, as their engines' responses arrive.

A leg gets its response by callbacks of the event loop's reads (io/wire/response_handler.py), and
tells requests/attempt_legs.py what matters: the prefill engine's answer, the first event of a
stream, the end, a failure. The pieces of a stream behind its first event go to the client at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Protocol

from pdrelay_proxy.core.http.bounded_body import ANSWER_MOST
from pdrelay_proxy.core.model import EngineResponse, Instance, PrefillResult
from pdrelay_proxy.core.protocol.engine_errors import leg_error, refusal
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.given_up import given_up, is_given_up
from pdrelay_proxy.core.protocol.response_filter import check_type, clean_answer, is_half, is_stream
from pdrelay_proxy.core.protocol.sse import (
    LINE_MOST,
    Beginning,
    WholeLines,
    error_status,
    first_data,
    line_too_long,
)
from pdrelay_proxy.core.protocol.stream_opening import Opening
from pdrelay_proxy.core.protocol.usage import (
    prompt_tokens_in,
    usage_alone,
    with_cache_usage,
    with_cache_usage_in,
)
from pdrelay_proxy.core.raw_json import Fields
from pdrelay_proxy.core.request_record import LegRecord
from pdrelay_proxy.core.routing.retries import LegFailed
from pdrelay_proxy.errors import AnswerRefused, EngineError, Refused
from pdrelay_proxy.io.wire.response_handler import ResponseHandler, half_answer

_OK: Final = 200
_DONE: Final = b"[DONE]"


class LegSpan(Protocol):
    """The span of a leg, where spans are wanted."""

    def answered(self, status: int) -> None:
        """The head of the response is here."""
        ...

    def end(self, error: Exception | None) -> None:
        """The leg is over."""
        ...


class LegOwner(ABC):
    """The attempt that a leg belongs to. None of the calls waits or raises."""

    __slots__ = ()

    @abstractmethod
    def prefill_answered(self, leg: "PrefillLeg", body: bytes, /) -> None:
        """The whole response of the prefill engine is here."""

    @abstractmethod
    def stream_begun(self, leg: "DecodeLeg", counted: int | None, /) -> None:
        """The first event of a stream is here, and it is no error; ``counted``: tokens of the
        prompt, if it says.
        """

    @abstractmethod
    def prompt_counted(self, leg: "DecodeLeg", counted: int, /) -> None:
        """The end of a stream says how many tokens the prompt has."""

    @abstractmethod
    def stream_ended(self, leg: "DecodeLeg", /) -> None:
        """All of the stream is here."""

    @abstractmethod
    def decode_answered(self, leg: "DecodeLeg", body: bytes, /) -> None:
        """The whole response of a decode engine is here, and it is no stream."""

    @abstractmethod
    def leg_failed(self, leg: "EngineLeg", error: EngineError | Refused, /) -> None:
        """Nothing more will come of it."""

    @abstractmethod
    def hold(self, leg: "EngineLeg", size: int, /) -> None:
        """Charge bytes of an answer that is kept until it is complete; the request ends where there
        are too many.
        """

    @abstractmethod
    def crash(self, bug: Exception, /) -> None:
        """The router has a bug: one of these calls has raised."""


class EngineLeg(ResponseHandler):
    """What both legs have in common. Times are seconds of the request's clock."""

    __slots__ = (
        "_pieces",
        "answered_s",
        "content_type",
        "due",
        "failure",
        "fault",
        "held",
        "instance",
        "is_closed",
        "owner",
        "record",
        "span",
        "status",
        "was_sent",
    )

    def __init__(
        self, owner: LegOwner, instance: Instance, sent_at: float, due: float | None
    ) -> None:
        ResponseHandler.__init__(self, instance.id)
        self.owner = owner
        self.instance = instance
        # of what is no stream; of a stream the last two, while they count
        self._pieces: list[bytes] = []
        self.due = due  # when the engine has had all its time; None: never
        self.record = LegRecord(instance.id, None, sent_at)
        self.fault: LegFailed | None = None  # why nothing more will come of it
        self.failure: Failure | None = None  # how it is counted
        # seconds until its good answer, if that is counted with its end
        self.answered_s: float | None = None
        self.held = 0  # bytes of its answer that are charged
        self.is_closed = False  # it is counted, and nothing more comes of it
        self.was_sent = False  # the engine had all of the request when it was closed
        self.span: LegSpan | None = None
        self.status = 0
        self.content_type = b""

    def arrived_whole(self, content_type: bytes, body: bytes) -> None:
        """All of an answer of status 200, which is no stream, has come at once."""
        if self.error is not None:
            return
        self._head_arrived(_OK, content_type)
        self.complete = True
        self.answered(body)

    @abstractmethod
    def answered(self, body: bytes) -> None:
        """It is complete, and no stream."""

    def response(self, body: bytes) -> EngineResponse:
        """Return all of its answer."""
        return EngineResponse(self.status, self.content_type.decode("latin-1"), body)

    @property
    def may_be_read(self) -> bool:
        """Tell whether the engine has, or had, all of the request."""
        return self.was_sent if self.is_closed else self.is_sent

    @property
    @abstractmethod
    def has_good_beginning(self) -> bool:
        """Tell whether the engine has taken the request: the first event of a stream is here, or
        the head of a 200.
        """

    def let_go(self) -> None:
        """End its span, and drop what is left of it: it is over."""
        if self.span is not None:
            self.span.end(None if self.fault is None else self.fault.error)
        if not self.complete:
            self.drop()

    def fail(self, error: EngineError) -> None:
        """It broke off, or was given up."""
        self.owner.leg_failed(self, error)

    def crashed(self, bug: Exception) -> None:
        """The router has a bug."""
        self.owner.crash(bug)

    def end(self) -> None:
        """All of it is here."""
        body = b"".join(self._pieces)
        self._pieces = []
        self.answered(body)

    def _head_arrived(self, status: int, content_type: bytes) -> None:
        self.status = status
        self.content_type = content_type
        if self.span is not None:
            self.span.answered(status)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece of an answer that is no stream."""
        self._pieces.append(piece)
        if self.held + len(piece) > ANSWER_MOST:
            reason = f"{self.engine} answered with more than {ANSWER_MOST} bytes"
            self.give_up(AnswerRefused(reason))
        else:
            self.owner.hold(self, len(piece))


class PrefillLeg(EngineLeg):
    """The leg that computes the prompt."""

    __slots__ = (
        "counted",
        "handed_over_at",
        "handover",
        "is_followed",
        "is_read",
        "learns",
        "load",
        "opens",
        "reuses",
        "stream_opening",
    )

    def __init__(
        self, owner: LegOwner, instance: Instance, sent_at: float, due: float | None
    ) -> None:
        EngineLeg.__init__(self, owner, instance, sent_at, due)
        # its endpoint-load-metrics header: how busy the engine is; empty: it does not say
        self.load = b""
        self.handover: PrefillResult | None = None  # what its answer is good for, once that is here
        self.handed_over_at = 0.0
        # tokens of the prompt, as the engine says, and of what the client has since
        self.counted: int | None = None
        self.is_followed = False  # a decode leg was sent behind its answer
        self.is_read = False  # a decode engine has come, or may have come, for its blocks
        self.learns = False  # it was asked for the tokens of the prompt, for later prompts
        self.reuses = False  # the same, for the decode engine
        self.opens = False  # it was asked for what the client's stream may begin with
        self.stream_opening: Opening | None = None  # what that begins with, as its answer says

    @property
    def has_good_beginning(self) -> bool:
        """Tell whether the engine has taken the request."""
        return self.status == _OK

    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """Its head is here."""
        self._head_arrived(status, content_type)
        self.load = load

    def arrived(self, piece: bytes, *, last: bool = False) -> None:  # noqa: ARG002 (the end is told)
        """Keep what comes."""
        self._keep(piece)

    def answered(self, body: bytes) -> None:
        """It is complete."""
        self.owner.prefill_answered(self, body)


class ReadTimes:
    """When the reads of a stream come."""

    __slots__ = ("clock", "gaps", "last")

    def __init__(self, clock: Callable[[], float], gaps: list[float], last: float) -> None:
        """``gaps``: takes the seconds between two of them; ``last``: the time of the latest."""
        self.clock = clock
        self.gaps = gaps
        self.last = last


class DecodeLeg(EngineLeg):
    """The leg whose answer the client gets."""

    __slots__ = (
        "_beginning",
        "_is_stream",
        "cache_usage",
        "counted",
        "counts",
        "follows",
        "heard",
        "is_last",
        "lines",
        "reads",
        "relay",
        "shown",
        "sink",
    )

    def __init__(
        self, owner: LegOwner, instance: Instance, sent_at: float, due: float | None
    ) -> None:
        EngineLeg.__init__(self, owner, instance, sent_at, due)
        self.reads: ReadTimes | None = None  # of a stream, once it has begun
        self._beginning: Beginning | None = None  # of a stream whose first event is not complete
        self._is_stream = False
        self.lines: WholeLines | None = None  # of a stream that has begun well
        # what the client gets first: the beginning of a stream, or a whole answer
        self.shown: bytes | None = None
        self.sink: Callable[[bytes], object] | None = None  # takes what comes behind that
        # the same for a whole chunk, as it came
        self.relay: Callable[[bytes], object] | None = None
        self.is_last = False  # the end of the stream has come with its beginning
        self.follows = False  # it was sent behind the answer of a prefill engine
        self.heard = False  # something has come since the last look at the time
        self.counts = True  # it may still say how many tokens the prompt has
        self.counted: int | None = None  # what it has said
        # what the client is told of the prefill engine's cache
        self.cache_usage: Fields | None = None

    @property
    def has_good_beginning(self) -> bool:
        """Tell whether the engine has taken the request."""
        return self.lines is not None or (self.status == _OK and not self._is_stream)

    @property
    def refused_in_stream(self) -> bool:
        """Tell whether the engine has refused the request by an event: vLLM tells its connector of
        the refusals that are whole answers alone (vllm/entrypoints/generate/base/serving.py).
        """
        return self._is_stream and self.failure is Failure.REFUSED

    def take_shown(self) -> bytes:
        """Return what the client gets first, once."""
        shown = self.shown
        self.shown = None
        return b"" if shown is None else shown

    def finish(self) -> tuple[bytes, bool]:
        """Return what is left of a stream that has ended, and whether it was complete."""
        return (b"", False) if self.lines is None else self.lines.finish()

    def began(self, status: int, content_type: bytes, load: bytes) -> None:  # noqa: ARG002 (prefill's load counts)
        """Its head is here."""
        self._head_arrived(status, content_type)
        self._is_stream = status == 200 and is_stream(content_type)

    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        """Pass on what may be shown."""
        lines = self.lines
        if lines is not None:
            try:
                passing = lines.feed(piece)
            except EngineError as error:
                self.give_up(error)
                return
            if passing:
                if self.cache_usage is not None:
                    passing = self._with_cache_usage(passing, self.cache_usage)
                self._pass_on(lines, passing)
        elif self._is_stream:
            self._begin(piece, last=last)
        else:
            self._keep(piece)

    def chunk_arrived(self, chunk: bytes, piece: bytes) -> None:
        """Pass on a token: as it came, where nothing of it has to be held back or taken out."""
        lines = self.lines
        relay = self.relay
        if lines is None or relay is None:
            self.arrived(piece)
            return
        try:
            passing = lines.feed(piece)
        except EngineError as error:
            self.give_up(error)
            return
        if self.cache_usage is not None and passing:
            passing = self._with_cache_usage(passing, self.cache_usage)
        if passing is piece:
            self._note(lines, passing)
            relay(chunk)
        elif passing:
            self._pass_on(lines, passing)

    def _with_cache_usage(self, passing: bytes, usage: Fields) -> bytes:
        """Have the client told of the prefill engine's cache."""
        with_usage = with_cache_usage_in(passing, usage)
        if with_usage is not passing:
            self.record.own_usage = passing
        return with_usage

    def _note(self, lines: WholeLines, passing: bytes) -> None:
        """Take in what passes tells, and when it came."""
        self.heard = True
        reads = self.reads
        if reads is not None:
            now = reads.clock()
            reads.gaps.append(now - reads.last)
            reads.last = now
        if lines.erred:
            self.failure = Failure.BAD_RESPONSE  # now, for many clients hang up at an error
        if self.counts:
            self._pieces.append(passing)
            if len(self._pieces) > 2:
                del self._pieces[0]

    def _pass_on(self, lines: WholeLines, passing: bytes) -> None:
        self._note(lines, passing)
        if self.sink is not None:
            self.sink(passing)
        elif self.shown is not None:
            self.shown += passing

    def _begin(self, piece: bytes, *, last: bool) -> None:
        """Wait for the first event: it tells a request that has failed from one that has begun."""
        beginning = self._beginning
        received = piece
        data = first_data(piece) if beginning is None else None
        if data is None:
            if beginning is None:
                beginning = self._beginning = Beginning()
            data = beginning.feed(piece)
            if data is None:
                if beginning.line_size > LINE_MOST:
                    self.give_up(line_too_long(self.engine))
                elif len(beginning.received) > ANSWER_MOST:
                    self.give_up(
                        AnswerRefused(
                            f"{self.engine} sent more than {ANSWER_MOST} bytes and no event"
                        )
                    )
                return
            received = bytes(beginning.received)
        if data == _DONE:
            self.give_up(given_up(self.engine))  # no answer has no token
        else:
            self._begin_with(data, received, last=last)

    def _begin_with(self, data: bytes, received: bytes, *, last: bool) -> None:
        """Begin the stream; ``data``: of its first event, which is in ``received``."""
        if (status := error_status(data)) is not None:
            self.drop()
            self.owner.leg_failed(self, refusal(self.engine, status, data))
        else:
            lines = WholeLines(self.engine)
            try:
                check_type(self.engine, self.content_type)
                shown = lines.feed(received)
                if self.cache_usage is not None:
                    shown = self._with_cache_usage(shown, self.cache_usage)
            except EngineError as error:
                self.give_up(error)
                return
            self.lines = lines
            self.shown = shown
            self.is_last = last
            self._beginning = None
            self.heard = True
            if lines.erred:
                self.failure = Failure.BAD_RESPONSE
            self.owner.stream_begun(self, prompt_tokens_in(received) if self.counts else None)

    def end(self) -> None:
        """All of it is here."""
        if self.lines is not None or self._is_stream:
            if self.counts and self._pieces:
                self._count_prompt()
            self.owner.stream_ended(self)
            return
        EngineLeg.end(self)

    def read_answer(self, body: bytes, *, is_made: bool) -> None:
        """Keep what the client gets of an answer that is no stream; raises EngineError, Refused: it
        is no good one.

        ``is_made``: a model made it; else it may repeat what its client says of another one.
        """
        if self.status != _OK:
            raise leg_error(self.instance, self.response(body))
        check_type(self.engine, self.content_type)
        if self.until_close and is_half(self.content_type, body):
            raise half_answer(self.engine)
        if is_made and is_given_up(body):
            raise given_up(self.engine)
        shown = clean_answer(self.engine, self.content_type, body)
        if self.cache_usage is not None:
            self.record.own_usage = usage_alone(shown)
            shown = with_cache_usage(shown, self.cache_usage)
        self.shown = shown

    def _count_prompt(self) -> None:
        """Look for the usage, which engines write into the first event or the last ones: to look at
        each costs more.
        """
        counted = prompt_tokens_in(b"".join(self._pieces))
        if counted is not None:
            self.owner.prompt_counted(self, counted)

    def answered(self, body: bytes) -> None:
        """It is complete, and no stream."""
        self.owner.decode_answered(self, body)
