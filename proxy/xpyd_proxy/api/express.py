"""The short way in and out for the ordinary request: what comes before its legs, how its answer is written, its end.

Everything here has its twin on the way through FastAPI: the door and the keys (api/door.py), the journey and the line
in the log (api/tracking.py), the gate (relay/gate.py), the answer (api/showing.py, api/hot.py). A request that is not
ordinary in any respect is left to that way before anything has been counted for it; tests send the same requests both
ways and compare.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE

from xpyd_proxy.api.door import ANYBODY, cut_short
from xpyd_proxy.api.examining import LARGE
from xpyd_proxy.api.hot import Platform
from xpyd_proxy.api.incoming import PASSED_ON
from xpyd_proxy.api.line import log_request
from xpyd_proxy.api.problems import error_body
from xpyd_proxy.api.showing import last_event
from xpyd_proxy.api.tracking import BEGUN, NO_SNIFFING
from xpyd_proxy.core.admission import Admission, Ticket
from xpyd_proxy.core.asking import ask_of_call
from xpyd_proxy.core.dialect import check_wanted_now, parse
from xpyd_proxy.core.journey import HUNG_UP, Journey, Outcome, client_id
from xpyd_proxy.core.keys import Keyring, shown_key
from xpyd_proxy.core.lifetime import Lifetime, Stage
from xpyd_proxy.core.model import Api, Ask, Call, RequestId
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.core.salts import Salts
from xpyd_proxy.core.sites import Sites
from xpyd_proxy.core.urgency import limited
from xpyd_proxy.errors import BadRequest, ProxyError, TurnedAway
from xpyd_proxy.relay.attempt import Attempt, Left, Stop
from xpyd_proxy.relay.gate import Gate
from xpyd_proxy.relay.ride import Ride, Rides, Trip
from xpyd_proxy.settings import ClientKvParams, Settings

LEFT: Final = "xpyd.left"  # in a scope: a Left
_NO_SNIFFING: Final = b"%b: %b\r\n" % NO_SNIFFING
_FROM_BROWSERS: Final = frozenset({b"origin", b"sec-fetch-site"})
_APIS: Final = {api.value: api for api in Api}
_PLAIN_TYPES: Final[set[bytes]] = set()  # content types that may be sent
_PLAIN_TYPES_MOST: Final = 64


@dataclass(slots=True)
class Express:
    """Takes the requests that can go the short way."""

    rides: Rides
    settings: Settings
    gate: Gate
    lifetime: Lifetime
    keyring: Keyring
    sites: Sites
    new_id: Callable[[], RequestId]
    clock: Callable[[], float]  # seconds; only differences count
    finished: Callable[[Journey, Outcome], None]
    salts: Salts | None = None
    _admission: Admission = field(init=False)  # that of the gate

    def __post_init__(self) -> None:
        self._admission = self.gate.admission

    def take(
        self, platform: Platform, path: str, headers: list[tuple[bytes, bytes]], body: bytes, *, keep_alive: bool
    ) -> "Passenger | None":
        """Take a request, which is then under way; None: it is not ordinary, and nothing was counted for it."""
        start = self.clock()
        shown = dict(headers)
        caller = self._caller(headers, shown)
        call = None if caller is None else self._call(path, headers, shown, body, caller)
        if caller is None or call is None:
            return None
        name = shown.get(b"x-request-id")
        journey = Journey(self.new_id(), client_id=None if name is None else client_id(name))
        ask = ask_of_call(call)
        ticket = self._admission.admit(caller, len(body), now=start)
        trip = None if ticket is None else self._board(call, ask, journey, ticket)
        if ticket is None or trip is None:
            return None
        passenger = Passenger(self, platform, trip, ticket, start, keep_alive=keep_alive)
        self.rides.relay.budget.came(now=start)
        self.lifetime.in_flight += 1
        try:
            passenger.depart(trip)
        except BaseException:
            self.leave(ticket)
            self.lifetime.in_flight -= 1
            raise
        return passenger

    def _board(self, call: Call, ask: Ask, journey: Journey, ticket: Ticket) -> Trip | None:
        """Choose the engines of a request that was let in; None: there are none, and it has to be told why."""
        try:
            prefill, decode = self.rides.fleet.any_pair(ask)
        except ProxyError:
            self._admission.take_back(ticket)
            self._wake()
            return None
        except BaseException:
            self.leave(ticket)
            raise
        return Trip(call, journey, ask, prefill, decode)

    def leave(self, ticket: Ticket) -> None:
        """Give back the place of a request that is over."""
        self._admission.leave(ticket)
        self._wake()

    def _wake(self) -> None:
        if self._admission.has_news:
            self.gate.wake()

    def lets_in(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request may be read to its end before it is looked at."""
        shown = dict(headers)
        declared = shown.get(b"content-length", b"0")
        fits = declared.isdigit() and int(declared) <= self.settings.max_body_bytes
        return fits and self._caller(headers, shown) is not None

    def _caller(self, headers: list[tuple[bytes, bytes]], shown: Mapping[bytes, bytes]) -> str | None:
        """Return whose request it is, if it is let in and its headers are plain."""
        if len(shown) < len(headers) or self.lifetime.stage is not Stage.SERVING or b"x-data-parallel-rank" in shown:
            return None
        if shown.get(b"content-type") != b"application/json":
            return None
        has_keys = self.keyring.keys is not None
        if not self.sites.admits(shown.get(b"host", b""), has_keys=has_keys):
            return None
        if self.keyring.keys is None:
            return ANYBODY if _FROM_BROWSERS.isdisjoint(shown) else None
        key = shown_key(tuple(headers))
        return None if key is None else self.keyring.keys.owner(key)

    def _call(
        self, path: str, headers: list[tuple[bytes, bytes]], shown: Mapping[bytes, bytes], body: bytes, caller: str
    ) -> Call | None:
        """Read the request, if it is one for two legs, one after the other."""
        relay, api = self.rides.relay, _APIS[path]
        if relay.rules.resume or relay.learned.pushes or len(body) > LARGE:
            return None
        try:
            fields = parse(body, strip_private=self.settings.client_kv_params is ClientKvParams.STRIP)
            check_wanted_now(api, fields)
            passed_on = () if PASSED_ON.isdisjoint(shown) else tuple([each for each in headers if each[0] in PASSED_ON])
            passed_on, fields, _ = limited(passed_on, fields, self.keyring.least_of(caller))
            if self.salts is not None:
                fields = self.salts.salted(fields, caller)
        except BadRequest:
            return None
        call = Call(api, fields, passed_on)
        reason = solo_reason(api, fields, min_prompt_chars=relay.rules.min_prompt_chars)
        return call if reason is None else None

    def account(self, journey: Journey, outcome: Outcome) -> None:
        """Count a request that is over, and write its line."""
        self.finished(journey, outcome)
        log_request(journey, outcome)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is still under way: the router has no more time."""
        self.rides.close()
        error = cut_short()
        for ride in self.rides:
            ride.cut_off(error)
        self.rides.sight.later.settle()  # no timer runs any more once the loop has ended


class Passenger:
    """One request on the short way; to uvicorn it is the cycle of its connection."""

    __deletable__ = ("_platform", "_write")  # mypyc wants to know
    __slots__ = (
        "_call",
        "_express",
        "_first",
        "_held",
        "_journey",
        "_path",
        "_platform",
        "_ride",
        "_start",
        "_streams",
        "_ticket",
        "_write",
        "disconnected",
        "keep_alive",
        "response_complete",
    )

    def __init__(
        self, express: Express, platform: Platform, trip: Trip, ticket: Ticket, start: float, *, keep_alive: bool
    ) -> None:
        self._express = express
        self._platform = platform
        self._write = platform.transport.write  # a method of the platform would cost each token 3 % of its time
        self._call: Call | None = trip.call  # until it is over
        self._journey = trip.journey
        self._ticket = ticket
        self._path = trip.call.path
        self._start = start
        self._first: float | None = None  # when a stream began
        self._streams = False
        self._held = b""  # of the answer, to be written with its end
        self._ride: Ride | None = None
        self.keep_alive = keep_alive
        self.disconnected = self.response_complete = False

    def depart(self, trip: Trip) -> None:
        """Send the first leg."""
        self._ride = ride = Ride(self._express.rides, self, trip)
        ride.set_off()

    # For uvicorn

    @property
    def message_event(self) -> "Passenger":
        """Uvicorn sets it when the client has gone."""
        return self

    def set(self) -> None:
        """Drop everything if the client has gone."""
        ride = self._ride
        if self.disconnected and ride is not None:
            ride.leave()
            self._finish(HUNG_UP)

    def full(self) -> None:
        """Have the engine wait: the client is slow."""
        if self._ride is not None:
            self._ride.pause()

    def empty(self) -> None:
        """Go on."""
        if self._ride is not None:
            self._ride.resume()

    # For the ride

    def show(self, content_type: bytes, body: bytes, *, streams: bool, last: bool) -> None:
        """Begin the answer; what ends at once is written in one go."""
        express, self._streams = self._express, streams
        if express.lifetime.stage is not Stage.SERVING:
            self.keep_alive = False
        if streams:
            self._first = express.clock()
            data = b"%b%x\r\n%b\r\n" % (self._head(content_type, b""), len(body), body)
        else:
            data = self._head(content_type, b"content-length: %d\r\n" % len(body)) + body
        if last:
            self._held = data
        else:
            self._write(data)

    def pour(self, piece: bytes) -> None:
        """Go on with a stream."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self, piece: bytes) -> None:
        """End a good answer."""
        self._journey.answered = True
        if self._streams:
            end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
            self._write(self._held + end if self._held else end)
        else:
            self._write(self._held)
        self._finish(200)

    def break_off(self, error: Exception) -> None:
        """End a stream that will not come to its good end."""
        self._journey.fault = str(error)
        self.end(last_event(self._path, error))

    def stopped(self, attempt: Attempt, stop: Stop) -> None:
        """Leave the request to the way of all others."""
        self._ride = None
        assert self._call is not None
        left = Left(self._call, attempt, stop, self._ticket)
        extras = {BEGUN: (self._start, self._journey), LEFT: left}
        self._platform.leave_to_asgi(self._path, extras, keep_alive=self.keep_alive)

    def cut_off(self, error: Exception) -> None:
        """Tell the client that its answer does not come, or will not be complete."""
        if self.response_complete:
            return
        self.keep_alive = False
        if self._first is not None:
            self.break_off(error)
            return
        self._journey.fault = str(error)
        status, body = error_body(error)
        later = b"retry-after: %d\r\n" % error.retry_after_s if isinstance(error, TurnedAway) else b""
        self._write(self._head(b"application/json", b"content-length: %d\r\n%b" % (len(body), later), status) + body)
        self._finish(status)

    def _head(self, content_type: bytes, more: bytes, status: int = 200) -> bytes:
        journey = self._journey
        said = journey.id_lines()
        timing = journey.server_timing() if self._express.settings.server_timing else ""
        if timing:
            said = f"{said}server-timing: {timing}\r\n"
        parts = [
            STATUS_LINE[status],
            self._platform.default_lines(),
            b"content-type: ",
            content_type if content_type in _PLAIN_TYPES else _plain(content_type),
            b"\r\n",
            more,
            said.encode("latin-1"),
            _NO_SNIFFING,
            b"" if self.keep_alive else b"connection: close\r\n",
            b"\r\n" if more else b"transfer-encoding: chunked\r\n\r\n",
        ]
        return b"".join(parts)

    def _finish(self, status: int) -> None:
        express, journey, start = self._express, self._journey, self._start
        self.response_complete, self._ride = True, None
        self._call, self._held = None, b""  # the connection keeps us until its next request
        express.leave(self._ticket)
        express.lifetime.in_flight -= 1
        first_s = None if self._first is None else self._first - start
        outcome = Outcome(self._path, status, express.clock() - start, first_s)
        express.rides.sight.later.add(express.account, journey, outcome)
        platform = self._platform
        del self._platform, self._write  # a connection that ends would wait for the garbage collector, and we with it
        platform.answered(keep_alive=self.keep_alive)


def _plain(content_type: bytes) -> bytes:
    """Look at an engine's content type before it goes into a head of ours."""
    if HEADER_VALUE_RE.search(content_type):
        raise RuntimeError(f"the content type {content_type!r} cannot be sent")
    if len(_PLAIN_TYPES) < _PLAIN_TYPES_MOST:
        _PLAIN_TYPES.add(content_type)
    return content_type
