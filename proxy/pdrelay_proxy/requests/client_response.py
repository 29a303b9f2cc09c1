"""What the client of one request gets: a stream, a whole answer, or an error, with the head that
belongs to it.

requests/response.py writes the bytes. The pieces of a plain stream go from the decode leg to that
writer; they come by here only if something has to be remembered of them.
"""

import logging
from collections.abc import Mapping
from typing import Final

from pdrelay_proxy.core.admission.lifetime import Stage
from pdrelay_proxy.core.fleet.pair_history import Pair, PairTrouble
from pdrelay_proxy.core.model import LegOrder
from pdrelay_proxy.core.protocol.asked_usage import without_usage
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.protocol.fault_table import failure_of
from pdrelay_proxy.core.protocol.stream_opening import Opening
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST
from pdrelay_proxy.errors import EngineError, ProxyError, TurnedAway, forget_frames
from pdrelay_proxy.requests.attempt_legs import AttemptLegs
from pdrelay_proxy.requests.error_body import error_answer, last_event
from pdrelay_proxy.requests.legs import DecodeLeg
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.response import (
    NO_SNIFFING,
    STREAM,
    STREAM_LINES,
    ResponseWriter,
    head_lines,
)
from pdrelay_proxy.requests.terms import StreamCut

_OK: Final = 200
_BUG: Final = 500
_EVENT: Final = b"data:"
_NEXT_EVENT: Final = b"\n" + _EVENT
_CONCURRENT: Final = LegOrder.CONCURRENT
_SERVING: Final = Stage.SERVING
logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection, or that has refused the request in the middle."""

    def __init__(self, refusal: ProxyError | None = None) -> None:
        """``refusal``: what the client has got from its connection."""
        super().__init__()
        self.refusal = refusal


class ClientResponse:
    """The response to one request."""

    __slots__ = (
        "_keeps",
        "_life",
        "added_lines",
        "cut",
        "events",
        "failure",
        "hides_usage",
        "is_paused",
        "replay",
        "writer",
    )

    def __init__(self, life: RequestLife, writer: ResponseWriter) -> None:
        self._life = life
        self._keeps = False  # the end of the stream matters
        self.writer = writer
        self.added_lines = b""  # of the head, for pages of other sites
        self.is_paused = False  # the client reads slowly: the engine has to wait
        self.cut: StreamCut | None = None  # the stream is to be cut now
        # of a stream that another engine continues, or could continue
        self.replay: Continuation | None = None
        self.failure: Exception | None = None  # the error that the client got
        self.events = 0  # of its stream, if tokens are counted
        self.hides_usage = False  # it did not ask for the usage of its stream, and the router did

    # ---- a stream from an engine

    def open_stream(self, legs: AttemptLegs, opening: Opening, *, can_resume: bool) -> None:
        """Begin a stream before a decode engine has answered; ``can_resume``: another engine may go
        on with the stream.
        """
        life = self._life
        life.record.ttft_s = life.elapsed_s()
        self.writer.begin(
            _OK,
            self.stream_lines(),
            self._shown(opening.events()),
            streams=True,
            last=opening.is_all,
        )
        legs.opened(opening)
        if opening.is_all:
            life.record.answered = True
            self.writer.end()
        else:
            self.replay = opening.continuation(can_resume=can_resume)

    def begin_stream(self, legs: AttemptLegs, leg: DecodeLeg) -> None:
        """Write the head with the first event: the head's time is the first token's."""
        piece = leg.take_shown()
        replay = self.replay
        writer = self.writer
        keeps_end = self._keeps_end()
        self._keeps = keeps_end
        is_plain = replay is None and not keeps_end and not self.hides_usage
        legs.is_streaming = True
        leg.sink = writer.write if is_plain else self._write_on
        leg.relay = writer.relay if is_plain else None
        if self.is_paused:
            legs.pause()
        if replay is not None:
            piece = replay.gap() + replay.feed(piece)
        if keeps_end:
            self._keep_end(piece)
        piece = self._shown(piece)
        if not writer.begun:
            life = self._life
            life.record.ttft_s = life.elapsed_s()
            lines = self._head_lines(leg.content_type, STREAM_LINES)
            writer.begin(_OK, lines, piece, streams=True, last=leg.is_last and replay is None)
        elif piece:  # another engine has begun the stream, and broke off; or a comment has
            if self._life.record.ttft_s is None:
                self._life.record.ttft_s = self._life.elapsed_s()
            writer.write(piece)

    def _write_on(self, piece: bytes) -> None:
        """Write more of a stream whose end is kept, or which another engine could continue."""
        replay = self.replay
        if replay is not None:
            piece = replay.feed(piece)
        if piece:
            if self._keeps:
                self._keep_end(piece)
            if shown := self._shown(piece):
                self.writer.write(shown)
        if replay is not None and replay.broken:
            self._life.wake()  # last: what goes on from here may end the response

    def check_stream(self, leg: DecodeLeg) -> None:
        """Raise LegFailed's error or EngineError if the stream of a leg is broken, or StreamCut if
        it is to be cut.

        One whose last event has passed is whole, whatever becomes of its connection.
        """
        if leg.fault is not None and not leg.finish()[1]:
            raise leg.fault.error
        if self.replay is not None and self.replay.broken:
            raise EngineError("the engine sent an error in its stream")
        cut = self.cut
        if cut is not None and not leg.complete:
            self.cut = None
            raise cut

    def was_cut(self) -> bool:
        """Tell whether the stream was cut as it should be; if not, it stays whole."""
        left = self.cut
        self.cut = None
        return left is None

    def end_stream(self, legs: AttemptLegs, leg: DecodeLeg) -> None:
        """Write the end of a stream; raises EngineError: it is not complete."""
        rest, complete = leg.finish()
        if not complete:
            error = EngineError(f"{leg.engine} ended its stream without [DONE]")
            leg.failure = failure_of(error)
            raise error
        legs.close(leg)
        self._life.record.answered = True
        if self._keeps:
            self._keep_end(rest)
        self.writer.end(self._shown(rest if self.replay is None else self.replay.feed(rest)))

    # ---- what is no stream, or is made of several

    def write_leg(self, legs: AttemptLegs, leg: DecodeLeg) -> None:
        """Write the whole answer of a leg; raises EngineError: a stream was to go on with it."""
        body = leg.take_shown()
        if self._keeps_end():
            self._keep_end(body)
        legs.close(leg)
        if self.writer.begun:
            # it cannot be the rest of one
            raise EngineError(f"{leg.engine} answered with something that is no stream")
        self._life.record.answered = True
        self.writer.begin(_OK, self._head_lines(leg.content_type), body, streams=False)

    def write_whole(self, content_type: bytes, body: bytes) -> None:
        """Write an answer that is no stream."""
        if self._keeps_end():
            self._keep_end(body)
        self._life.record.answered = True
        self.writer.begin(_OK, self._head_lines(content_type), body, streams=False)

    def write_events(self, events: bytes) -> None:
        """Write some of a stream that the router has put together."""
        if self._keeps_end():
            self._keep_end(events)
        events = self._shown(events)
        life = self._life
        if life.record.ttft_s is None:  # a comment may have begun the stream
            life.record.ttft_s = life.elapsed_s()
        if not self.writer.begun:
            self.writer.begin(_OK, self.stream_lines(), events, streams=True)
        elif events:  # an empty piece would end the stream
            self.writer.write(events)

    def end_events(self, events: bytes) -> None:
        """Write the end of a stream that the router has put together."""
        if self._keeps_end():
            self._keep_end(events)
        if not self.writer.begun:  # the stream has no token
            self.writer.begin(_OK, self.stream_lines(), b"", streams=True, last=True)
        self._life.record.answered = True
        self.writer.end(self._shown(events))

    # ---- errors

    def write_error(self, error: Exception) -> int:
        """Write what went wrong, or hang up on the client; return the status for the log."""
        try:
            return self._write_error(error)
        except Exception as bug:
            logger.exception("request %s cannot be answered", self._life.record.request_id)
            forget_frames(bug)
            self.writer.keep_alive = False
            return _BUG

    def _write_error(self, error: Exception) -> int:
        record = self._life.record
        writer = self.writer
        if not isinstance(error, (ClientGone, ProxyError)):
            logger.error("request %s failed", record.request_id, exc_info=error)
        forget_frames(error)
        error.__context__ = None
        if isinstance(error, ClientGone):
            return self._note_gone(error.refusal)
        record.error = str(error)
        self.failure = error
        if writer.begun:
            writer.keep_alive = writer.keep_alive and not isinstance(error, TurnedAway)
            event = last_event(error, record.path)
            if self._keeps_end():
                self._keep_end(event)
            record.answered = True
            writer.end(event)
            return _OK
        overload = self._life.services.settings.current.overload_status
        answer = error_answer(error, record.path, overload)
        lines = self._head_lines(answer.content_type.encode("latin-1")) + answer.header_lines()
        writer.begin(answer.status, lines, answer.body, streams=False)
        return answer.status

    def _note_gone(self, refusal: ProxyError | None) -> int:
        """Return the status of a request whose client reads no answer of it."""
        if refusal is None:
            return CLIENT_CLOSED_REQUEST
        record = self._life.record
        record.error = str(refusal)
        self.failure = refusal
        overload = self._life.services.settings.current.overload_status
        return error_answer(refusal, record.path, overload).status

    # ---- heads and ends

    def stream_lines(self) -> bytes:
        """Return the lines of the head of a stream that the router begins itself."""
        return self._head_lines(STREAM, STREAM_LINES)

    def _head_lines(self, content_type: bytes, last_lines: bytes = NO_SNIFFING) -> bytes:
        services = self._life.services
        if services.lifetime.stage is not _SERVING:
            self.writer.keep_alive = False
        if self.added_lines:
            last_lines += self.added_lines
        wanted = services.settings.current.server_timing
        keys = services.intake.keyring.keys
        troubles = services.fleet.registry.troubles
        return head_lines(
            self._life.record,
            content_type,
            shows_times=wanted is not False,
            tells_cache=wanted is not None or keys is None or not keys.has_several,
            trouble=self._trouble(troubles) if troubles else "",
            last_lines=last_lines,
        )

    def _trouble(self, troubles: Mapping[Pair, PairTrouble]) -> str:
        """Return why the decode engine loads no KV of its prefill engine, as it showed last."""
        record = self._life.record
        if record.prefill is None or record.decode is None:
            return ""
        pair_trouble = troubles.get((record.prefill.instance, record.decode.instance))
        return "" if pair_trouble is None else pair_trouble.reason

    def _shown(self, events: bytes) -> bytes:
        """Return what the client gets of whole lines of its stream."""
        return without_usage(events) if self.hides_usage else events

    def _keeps_end(self) -> bool:
        """Tell whether the size and the end of the response matter: whether blocks have arrived, or
        will be found.
        """
        life = self._life
        services = life.services
        return (
            life.record.push is _CONCURRENT
            or services.fleet.remembers
            or services.gate.admission.counts_tokens
        )

    def _keep_end(self, piece: bytes) -> None:
        if piece:
            life = self._life
            life.record.wrote(piece)
            if life.services.gate.admission.counts_tokens:
                # of whole lines; a text may have the same mark in it
                self.events += piece.count(_NEXT_EVENT) + piece.startswith(_EVENT)
