"""The short way of the ordinary request: one prefill leg, one decode leg, both as callbacks of the event loop's reads.

It takes requests that are split and whose legs follow one another: nearly all of them. Nothing here waits, so there is
no task, no future and no timer of its own for a request. A leg that fails stops the ride, and the relay goes on from
there (relay/relay.py): there is one set of rules for what follows from a failure. Once something has been shown to the
client the relay could only report a failure, and so does the ride.

What is counted is told afterwards, for many requests at a time (io/later.py). Only what the choice of engines depends
on is told at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.load import ASK_FOR_REPORT
from xpyd_proxy.core.model import Answer, Ask, Call, Handover, Headers, Instance, InstanceId
from xpyd_proxy.core.passing import check_type, clean_answer, is_stream
from xpyd_proxy.core.raw_json import Pieces
from xpyd_proxy.core.retries import Chances, Failure, LegFailed, failure_of
from xpyd_proxy.core.rules import Patience
from xpyd_proxy.core.sse import Beginning, WholeLines, error_status
from xpyd_proxy.core.usage import prompt_tokens, prompt_tokens_in
from xpyd_proxy.core.verdict import JSON, check_prefill, refusal, refused_decode
from xpyd_proxy.core.whole import ANSWER_MOST
from xpyd_proxy.errors import EngineError, EngineTimeout, OutOfTime, Refused
from xpyd_proxy.io.fleet import LiveFleet
from xpyd_proxy.io.sight import Sight
from xpyd_proxy.io.wire.call import Call as Told
from xpyd_proxy.io.wire.teller import Teller
from xpyd_proxy.relay.attempt import Attempt, Outline, Stop
from xpyd_proxy.relay.relay import Relay
from xpyd_proxy.relay.reply import BEGINNING_MOST
from xpyd_proxy.relay.steps import Handovers, decode_body, prefill_body

_TICK_MOST: Final = 0.25  # seconds between two looks at the time of all rides
_TICK_LEAST: Final = 0.01
logger = logging.getLogger(__name__)
_TICKS: Final = 16  # looks in the shortest time that the rules give


class Rider(Protocol):
    """The client's side of a ride."""

    def show(self, content_type: bytes, body: bytes, *, streams: bool, last: bool) -> None:
        """Begin the answer: all of a body, or the beginning of a stream; ``last``: its end follows at once."""
        ...

    def pour(self, piece: bytes, /) -> None:
        """Go on with a stream."""
        ...

    def end(self, piece: bytes, /) -> None:
        """End a good answer, with these bytes if there are any left."""
        ...

    def break_off(self, error: EngineError | OutOfTime, /) -> None:
        """End a stream that will not come to its good end."""
        ...

    def cut_off(self, error: Exception, /) -> None:
        """End the answer, or the wait for it: the router ends, or something is wrong with it."""
        ...

    def stopped(self, attempt: Attempt, stop: Stop, /) -> None:
        """The ride is over before anything was shown: the relay has to go on from here."""
        ...


class Trip:
    """Who rides, and where to."""

    __slots__ = ("ask", "call", "decode", "journey", "prefill")

    def __init__(self, call: Call, journey: Journey, ask: Ask, prefill: Instance, decode: Instance) -> None:
        self.call = call
        self.journey = journey
        self.ask = ask
        self.prefill = prefill
        self.decode = decode


class Phase(IntEnum):
    """How far a ride has come; it never goes back."""

    PREFILL = 0  # the prefill leg is under way
    FIRST = 1  # the decode leg is, and nothing has been shown
    STREAM = 2  # the rest of a stream is on its way
    OVER = 3


_PREFILL, _FIRST, _STREAM, _OVER = Phase  # looking a member up takes as long as a call


@dataclass(slots=True)
class Rides:
    """The rides under way, and what they are made with: one timer looks at the time of all of them."""

    relay: Relay
    handovers: Handovers
    engines: Teller
    fleet: LiveFleet
    sight: Sight
    clock: Callable[[], float]  # seconds; only differences count
    reports: bool = False  # prefill engines are asked how busy they are
    _under_way: "set[Ride]" = field(default_factory=lambda: set[Ride]())
    _timer: asyncio.TimerHandle | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def __iter__(self) -> "Iterator[Ride]":
        """List those under way."""
        return iter(tuple(self._under_way))

    def places(self) -> Iterable[InstanceId]:
        """Return the engine of each leg that is under way."""
        return [ride.at.id for ride in self._under_way]

    def now(self) -> float:
        """Return the time on the event loop's clock."""
        if self._loop is None:  # asking for the loop costs a system call each time
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def begin(self, ride: "Ride") -> None:
        """Look after a ride."""
        self._under_way.add(ride)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_tick_s(self.relay.rules.patience), self._look_round)

    def over(self, ride: "Ride") -> None:
        """Forget it."""
        self._under_way.discard(ride)

    def close(self) -> None:
        """Look after nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_round(self) -> None:
        self._timer = None
        now = self.now()
        try:
            for ride in self:
                if ride.phase is not _OVER:
                    ride.look(now)
        finally:
            if self._under_way and self._timer is None:
                pause = _tick_s(self.relay.rules.patience)
                self._timer = asyncio.get_running_loop().call_later(pause, self._look_round)

    # Told afterwards

    def handed_over(self, ride: "Ride", seconds: float, ended: float, sent: float) -> None:
        """A prefill leg has ended well, after so many seconds, and the decode leg was sent."""
        self.proved(ride, ride.prefill, seconds, ended)
        self.sight.rode(ride.prefill, seconds, None, ride.request, ended)
        self.sight.handed_over(sent - ended, sent)

    def proved(self, ride: "Ride", instance: Instance, seconds: float, at: float) -> None:
        """An engine has given a good answer, or its beginning."""
        self.fleet.answered(instance, ride.request, seconds)
        self.sight.said(instance, seconds, at)


def _tick_s(patience: Patience) -> float:
    given = (patience.prefill_s, patience.first_token_s, patience.idle_s, patience.whole_s, patience.stream_s)
    shortest = min(seconds for seconds in given if seconds is not None)
    return min(_TICK_MOST, max(_TICK_LEAST, shortest / _TICKS))


class Ride:
    """One request. Times named ``now`` are the event loop's; all others are those of the rides' clock."""

    __deletable__ = ("_told",)  # mypyc wants to know

    __slots__ = (
        "_ask",
        "_call",
        "_counted",
        "_due",
        "_ends_at",
        "_failure",
        "_handed_over",
        "_handover",
        "_heard",
        "_journey",
        "_listens",
        "_of",
        "_patience",
        "_paused",
        "_reuses",
        "_rider",
        "_since",
        "_start",
        "_streams",
        "_told",
        "_transfer",
        "at",
        "decode",
        "phase",
        "prefill",
        "request",
    )

    _told: Told  # these while it is under way
    _rider: Rider

    def __init__(self, of: Rides, rider: Rider, trip: Trip) -> None:
        rules, now = of.relay.rules, of.now()
        self._of = of
        self._rider = rider
        self._call, self._journey, self._ask = trip.call, trip.journey, trip.ask
        self.prefill, self.decode = trip.prefill, trip.decode
        self._patience = patience = rules.patience
        self._reuses = rules.reuse_tokens
        self._since = now
        self._streams = trip.call.streams
        seconds = patience.stream_s if self._streams else patience.whole_s
        self._ends_at = None if seconds is None else now + seconds
        self._due: float | None = now + patience.prefill_s  # when the engine has had all its time
        self._handover: Handover | None = None
        self._handed_over = 0.0  # when that came
        self._failure: Failure | None = None  # of the leg that is under way
        self._counted: int | None = None  # tokens of the prompt, as the prefill engine says
        self._listens = True  # to what the decode engine says of them
        self._heard = self._paused = False
        self._start = 0.0  # of the leg that is under way
        self.at = self.prefill
        self.request = trip.journey.request_id
        self._transfer = of.relay.new_transfer()
        self.phase = _PREFILL

    def set_off(self) -> None:
        """Send the prefill leg."""
        of, prefill = self._of, self.prefill
        body = prefill_body(self._call, self.request, self._transfer, reuses=self._reuses)
        self._journey.prefill = Visit(prefill.id)
        of.fleet.enter(self.decode, self.request)  # its slot is held from now on
        of.begin(self)
        headers = (*self._call.headers, ASK_FOR_REPORT) if of.reports else self._call.headers
        self._send(prefill, headers, body, Prefilling(self, prefill.id))

    # The prefill leg

    def prefilled(self, answer: Answer) -> None:
        """Go on with the decode leg."""
        of, prefill, came = self._of, self.prefill, self._of.clock()
        of.engines.done(self._told)
        if of.reports and answer.load:
            of.fleet.reported(prefill, answer.load)
        try:
            check_prefill(prefill.id, answer)
            handover = of.handovers.take(
                self._call, self.request, self._transfer, prefill, told=None, answer=answer, reuses=self._reuses
            )
            body = decode_body(self._call, self._journey, self.request, handover)
        except (EngineError, Refused) as error:
            self._leg_failed(error)
            return
        self._handover = handover
        self._counted = handover.counted
        self._leave_prefill(came)
        self.phase, self.at = _FIRST, self.decode
        self._journey.decode = Visit(self.decode.id)
        seconds = self._patience.first_token_s if self._streams else None
        self._due = None if seconds is None else of.now() + seconds
        self._send(self.decode, self._call.headers, body, Decoding(self, self.decode.id))

    def _leave_prefill(self, came: float) -> None:
        """The prefill leg has ended well, and the decode leg is about to be sent."""
        of = self._of
        self._handed_over = came
        of.sight.later.add(of.handed_over, self, self._note_time(came), came, of.clock())
        of.fleet.leave(self.prefill, self.request)

    # The decode leg

    def whole(self, answer: Answer, content_type: bytes) -> None:
        """Show all of an answer that is no stream, unless it is none that can be shown."""
        if answer.status != 200:
            self._of.engines.done(self._told)
            self._leg_failed(refused_decode(self.decode.id, answer))
            return
        try:
            check_type(self.decode.id, content_type)
            shown = clean_answer(self.decode.id, content_type, answer.body)
        except EngineError as error:
            self._of.engines.done(self._told)
            self._leg_failed(error)
            return
        self._begun(prompt_tokens(answer.body))
        self._rider.show(content_type, shown, streams=False, last=True)
        self.done(b"")

    def begin_stream(
        self, content_type: bytes, lines: WholeLines, received: bytes, shown: bytes, *, last: bool
    ) -> None:
        """Show the beginning of a stream that has begun well; ``shown``: what may pass of what was received."""
        self.phase, self._heard = _STREAM, True
        self._begun(prompt_tokens_in(received))
        if lines.erred:
            self._failure = Failure.BROKEN
        self._rider.show(content_type, shown, streams=True, last=last)

    def passing(self, lines: WholeLines, piece: bytes) -> None:
        """Show some more of it."""
        self._heard = True
        if lines.erred:
            self._failure = Failure.BROKEN  # now, for many clients hang up at an error
        if self._listens:
            self._hear(prompt_tokens_in(piece))
        self._rider.pour(piece)

    def finish(self, lines: WholeLines) -> None:
        """The stream has ended, well or not."""
        rest, complete = lines.finish()
        if complete:
            self.done(rest)
        else:
            self._of.engines.done(self._told)
            self._break_off(EngineError(f"{self.decode.id} ended its stream without [DONE]"))

    def give_back_connection(self) -> None:
        """The answer is complete, if not a good one."""
        self._of.engines.done(self._told)

    def done(self, rest: bytes) -> None:
        """All of the answer is here."""
        rider = self._rider
        self._of.engines.done(self._told)
        self._end_leg()
        self._close()
        rider.end(rest)

    def _begun(self, counted: int | None) -> None:
        """The decode engine has begun to answer, and well."""
        of, now = self._of, self._of.clock()
        of.sight.legs.promise(self.decode.id)
        of.sight.later.add(of.proved, self, self.decode, self._note_time(now), now)
        self._hear(counted)

    def _hear(self, counted: int | None) -> None:
        """Take in how many tokens of prompt the decode engine has counted."""
        if counted is None:
            return
        self._listens = False
        if self._counted not in (None, counted):
            attempt = self._attempt()
            attempt.counted.prefill = self._counted
            self._of.relay.legs.hear(attempt, counted)

    # What goes wrong

    def leg_failed(self, error: EngineError | Refused) -> None:
        """The leg under way has failed, and its connection is closed, or about to be."""
        if self.phase is _STREAM and isinstance(error, EngineError):
            self._break_off(error)
        elif self.phase is not _OVER:
            self._leg_failed(error)

    def _leg_failed(self, error: EngineError | Refused) -> None:
        failed = LegFailed(self.at, error)
        failed.__cause__ = error
        self._failure = failed.failure
        self._stop(failed)

    def _stop(self, error: LegFailed | OutOfTime) -> None:
        sent = self.phase is _FIRST and self._told.is_sent
        self._note_time(self._of.clock())
        self._end_leg()
        due = None if self._handover is None else self._handed_over + self._patience.handoff_s
        stop = Stop(self.prefill, self.decode, error, self._handover, due, sent)
        attempt, rider = self._attempt(), self._rider
        attempt.counted.prefill = self._counted
        self._close()
        rider.stopped(attempt, stop)

    def _break_off(self, error: EngineError | OutOfTime) -> None:
        if isinstance(error, EngineError):
            self._failure = failure_of(error)
        rider = self._rider
        self._end_leg()
        self._close()
        rider.break_off(error)

    def leave(self) -> None:
        """The client has hung up: drop what is under way."""
        if self.phase is _OVER:
            return
        if self.phase is not _STREAM:
            self._note_time(self._of.clock())
        told, handover = self._told, self._handover
        unsent = self.phase is _FIRST and not told.is_sent
        self._end_leg()
        self._close()
        told.drop()
        if unsent and handover is not None and handover.coordinates is None:
            self._of.relay.give_back(self._call, self._attempt(), self.prefill, handover)

    def cut_off(self, error: Exception) -> None:
        """The router ends."""
        if self.phase is not _OVER:
            rider = self._rider
            self.leave()
            rider.cut_off(error)

    def crash(self, bug: Exception) -> None:
        """Something has been raised that should not be: the client is told, and the log says what."""
        logger.error("request %s failed", self.request, exc_info=bug)
        self.leave()
        self._rider.cut_off(bug)

    # Time

    def look(self, now: float) -> None:
        """See whether something has taken too long."""
        if self.phase is _STREAM and (self._heard or self._paused):
            self._heard = False
            self._due = None if self._patience.idle_s is None else now + self._patience.idle_s
        told = self._told
        if self._ends_at is not None and now >= self._ends_at:
            self._out_of_time()
            told.drop()
        elif self._due is not None and now >= self._due:
            self.leg_failed(EngineTimeout(self._late()))
            told.drop()

    def pause(self) -> None:
        """Let the engine wait: the client is slow, which is not held against the engine."""
        self._paused = True
        if self.phase is _STREAM:
            self._told.hold()

    def resume(self) -> None:
        """Go on; the engine has its full time again."""
        self._paused, self._heard = False, True
        if self.phase is _STREAM:
            self._told.go_on()

    def _late(self) -> str:
        patience = self._patience
        if self.phase is _PREFILL:
            return f"{self.at.id} did not answer within {patience.prefill_s:g} s"
        if self.phase is _FIRST:
            return f"{self.at.id} sent no token within {patience.first_token_s:g} s"
        return f"{self.at.id} sent nothing for {patience.idle_s:g} s"

    def _out_of_time(self) -> None:
        seconds = self._patience.total_s(streams=self._streams)
        if self.phase is _STREAM:
            self._break_off(OutOfTime(f"the stream was not complete within {seconds:g} s"))
        else:
            self._stop(OutOfTime(f"the request was not done within {seconds:g} s"))

    # What both legs do

    def _send(self, instance: Instance, headers: Headers, body: Pieces, told: Told) -> None:
        of = self._of
        self._told, self._start = told, of.clock()
        of.fleet.enter(instance, self.request)
        try:
            of.engines.tell(told, instance, self._call.path, headers=headers, request=self.request, body=body)
        except EngineError as error:
            self._leg_failed(error)

    def _note_time(self, now: float) -> float:
        """Note how long the leg under way has taken until now, and return it in seconds."""
        visit = self._journey.prefill if self.phase is _PREFILL else self._journey.decode
        seconds = now - self._start
        if visit is not None:
            visit.ms = seconds * 1000
        return seconds

    def _end_leg(self) -> float:
        """Tell that the leg is over, and return when."""
        of, now = self._of, self._of.clock()
        of.sight.later.add(of.sight.rode, self.at, now - self._start, self._failure, self.request, now)
        of.fleet.ended(self.at, self.request, self._failure)
        self._failure = None
        return now

    def _attempt(self) -> Attempt:
        """Return what the relay makes of a request at first."""
        outline = Outline(self._call.path, self._call.headers, self._ask, self._streams, since=self._since)
        chances = Chances(self._of.relay.rules.retries)
        return Attempt(outline, self._journey, chances, self._patience, self._ends_at, self.request, self._transfer)

    def _close(self) -> None:
        self.phase = _OVER
        self._of.fleet.leave(self.decode, self.request)
        self._of.over(self)
        del self._told  # they hold each other


class Prefilling(Told):
    """The answer of the prefill engine."""

    __slots__ = ("_content_type", "_load", "_pieces", "_ride", "_size", "_status")

    def __init__(self, ride: Ride, engine: str) -> None:
        super().__init__(engine)
        self._ride = ride
        self._pieces: list[bytes] = []
        self._size = 0

    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """Its head is here."""
        self._status, self._content_type, self._load = status, content_type, load

    def arrived(self, piece: bytes, *, last: bool = False) -> None:  # noqa: ARG002 (the end is told)
        """Keep what comes."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > ANSWER_MOST:
            self.give_up(EngineError(f"{self.engine} answered with more than {ANSWER_MOST} bytes"))

    def end(self) -> None:
        """All of it is here."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._ride.prefilled(Answer(self._status, self._content_type.decode("latin-1"), body, self._load))

    def fail(self, error: EngineError) -> None:
        """It broke off."""
        self._ride.leg_failed(error)

    def crashed(self, bug: Exception) -> None:
        """Something is wrong with us."""
        self._ride.crash(bug)


class Decoding(Told):
    """The answer of the decode engine."""

    __slots__ = ("_beginning", "_content_type", "_lines", "_pieces", "_ride", "_size", "_status", "_streams")

    def __init__(self, ride: Ride, engine: str) -> None:
        super().__init__(engine)
        self._ride = ride
        self._beginning = Beginning()  # up to the first event
        self._pieces: list[bytes] = []  # of what is no stream
        self._size = 0  # of those
        self._streams = False
        self._lines: WholeLines | None = None  # since something was shown

    def began(self, status: int, content_type: bytes, load: bytes) -> None:  # noqa: ARG002 (prefill's load counts)
        """Its head is here."""
        self._status, self._content_type = status, content_type
        self._streams = status == 200 and is_stream(content_type)

    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        """Show what may pass."""
        lines = self._lines
        if lines is not None:
            try:
                passing = lines.feed(piece)
            except EngineError as error:
                self.give_up(error)
                return
            if passing:
                self._ride.passing(lines, passing)
        elif self._streams:
            self._begin(piece, last=last)
        else:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size > ANSWER_MOST:
                self.give_up(EngineError(f"{self.engine} answered with more than {ANSWER_MOST} bytes"))

    def _begin(self, piece: bytes, *, last: bool) -> None:
        beginning = self._beginning
        data = beginning.feed(piece)
        if data is None:
            if len(beginning.received) > BEGINNING_MOST:
                self.give_up(EngineError(f"{self.engine} sent more than {BEGINNING_MOST} bytes and no event"))
        elif (status := error_status(data)) is not None:
            self.drop()
            self._ride.leg_failed(refusal(self.engine, status, JSON, data))
        else:
            received = bytes(beginning.received)
            lines = WholeLines(self.engine)
            try:
                check_type(self.engine, self._content_type)
                shown = lines.feed(received)
            except EngineError as error:
                self.give_up(error)
                return
            self._lines, self._beginning = lines, Beginning()
            self._ride.begin_stream(self._content_type, lines, received, shown, last=last)

    def end(self) -> None:
        """All of it is here."""
        if self._lines is not None:
            self._ride.finish(self._lines)
        elif self._streams:
            self._ride.give_back_connection()
            self._ride.leg_failed(EngineError(f"{self.engine} ended its stream before the first event"))
        else:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._ride.whole(Answer(self._status, self._content_type.decode("latin-1"), body), self._content_type)

    def fail(self, error: EngineError) -> None:
        """It broke off."""
        self._ride.leg_failed(error)

    def crashed(self, bug: Exception) -> None:
        """Something is wrong with us."""
        self._ride.crash(bug)
