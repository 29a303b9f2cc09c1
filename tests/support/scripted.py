"""Engines in memory whose every leg is a coroutine of the test, and the router before them, as far as requests go.

``Scripted`` stands where io/wire/leg_sender.py stands: it takes legs, gives the engines' answers, and knows which legs
are open. ``router_of`` builds a router around it, and a ``Client`` is one request with all that it has got.
"""

import asyncio
import inspect
import itertools
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.keys import Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.model import Api, EngineResponse, LegRequest, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import failure_of
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.routing.retries import RetryBudget
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.request_path.good_legs import GoodLegs, count_legs
from pdrelay_proxy.io.request_path.ids import new_transfer
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.known_settings import with_values
from pdrelay_proxy.requests.body_reader import BodyReader
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.intake import Intake
from pdrelay_proxy.requests.leg_bodies import LegBodies
from pdrelay_proxy.requests.release import Releaser
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.requests.services import LiveSettings, Services
from pdrelay_proxy.settings import KvTransferMode, Settings
from support.feature_routing import all_features

EVENT, DONE = b'data: {"id":"x"}\n\n', b"data: [DONE]\n\n"
EVENTS, JSON = "text/event-stream", "application/json"
NEVER_BROKEN = Settings(circuit_breaker_failures=0)  # however often the engines of a test fail


def request_id(leg):
    return dict(leg.headers)[b"x-request-id"].decode()


def params_of(leg):
    return json.loads(leg.body)["kv_transfer_params"]


def prefilled(leg, *, engine="e1", **changes):
    """The answer of a prefill engine that pushes."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": engine,
        "remote_request_id": f"cmpl-{request_id(leg)}-0-0123abcd",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 20,
        "transfer_mode": "push",
    }
    params = {name: value for name, value in (params | changes).items() if value is not None}
    return EngineResponse(200, JSON, json.dumps({"kv_transfer_params": params}).encode())


async def good_prefill(leg):
    return prefilled(leg)


async def pulled_prefill(leg):
    return prefilled(leg, transfer_mode="pull")


async def good_decode(leg):
    return 200, [EVENT, DONE]


async def never(*_):
    await asyncio.Event().wait()


def failing(*outcomes, then):
    """A side whose first legs end like this, and the others well."""
    left = list(outcomes)

    async def side(leg):
        if not left:
            return await then(leg)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return side


# ---- the engines' side


@dataclass
class Scripted:
    """What each side does with a leg: return, raise or wait.

    An answer is an ``EngineResponse``, or (status, parts, content type): its parts come one by one, and one that is a
    coroutine is waited for, one that is an exception breaks the answer off.
    """

    prefill: object
    decode: object
    connects: object = True  # at once; False: a leg is sent when its coroutine has returned; or what tells it of a leg
    ends_at_once: bool = False  # the end of an answer comes with its last part
    legs: list = field(default_factory=list)  # as they came
    open: list = field(default_factory=list)  # at this moment
    kept: int = 0  # connections that were given back behind a whole answer

    def send(self, call, instance, path, *, headers, request, body, content_type=b"application/json"):
        """Implements Teller."""
        named = (*headers, (b"x-request-id", request.encode()))
        Line(self, call, LegRequest(instance, path, b"".join(body), named, content_type))

    def done(self, call):
        """Implements Teller."""
        line = call.source
        call.source = None
        assert call.complete
        assert not line.is_kept
        line.is_kept = True
        self.kept += 1

    async def post(self, leg, *, timeout_s):
        """Implements Asked, for the legs that have blocks freed."""
        raise NotImplementedError

    def of(self, role):
        return [leg for leg in self.legs if leg.instance.role is role]


class Line:
    """The connection of one leg: tells its call what the coroutine of the test answers."""

    def __init__(self, engines, call, leg):
        self._engines = engines
        self._call = call
        self._leg = leg
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._left = []  # parts, of which some may be coroutines
        self._connects = engines.connects(leg) if callable(engines.connects) else engines.connects
        self.is_sent = self._connects
        self.is_over = self.is_kept = False
        engines.legs.append(leg)
        engines.open.append(leg)
        self._task = asyncio.create_task(self._live())
        if self._connects:
            call.source = self
        else:
            call.opening = self._task
        self._task.add_done_callback(self._ended)

    # What the call does with it

    def pause_reading(self):
        self._goes_on.clear()

    def resume_reading(self):
        self._goes_on.set()

    def abort(self):
        self._close()
        self._task.cancel()

    # What the engine does

    def _close(self):
        if not self.is_over:
            self.is_over = True
            self._engines.open.remove(self._leg)

    def _ended(self, task):
        self._close()
        for part in self._left:
            if inspect.iscoroutine(part):
                part.close()  # nobody has waited for it
        with suppress(asyncio.CancelledError):
            task.result()

    def _tell(self, what, *args, **more):
        """Tell the call something; as a connection does (io/wire/connection.py), tell it too if that has raised."""
        if self.is_over:
            return
        try:
            what(*args, **more)
        except Exception as bug:
            self._close()
            self._call.crashed(bug)

    async def _live(self):
        side = self._engines.prefill if self._leg.instance.role is Role.PREFILL else self._engines.decode
        try:
            await self._answer(await side(self._leg))
        except EngineError as error:
            self.is_sent = self.is_sent and error.reached
            self._close()
            self._call.failed(error)
        except Exception as bug:
            self._close()
            self._call.crashed(bug)

    async def _answer(self, answer):
        call = self._call
        (status, parts, content_type, load) = _taken_apart(answer)
        if not self._connects:
            call.source = self
            self.is_sent = True
        self._left = list(parts) if isinstance(parts, list) else []
        self._tell(call.began, status, content_type.encode(), load)
        for place, part in enumerate(parts, 1):
            if self.is_over:
                return
            if isinstance(part, Exception):
                raise part
            came = part if isinstance(part, bytes) else await part
            await self._goes_on.wait()
            last = self._engines.ends_at_once and place == len(parts)
            self._tell(call.arrived, came, last=last)
            if not last:
                await asyncio.sleep(0)  # each in a read of its own
        self._end()

    def _end(self):
        if not self.is_over:
            self._tell(self._call.ended)
            self._close()


def _taken_apart(answer):
    """Return the status, the parts, the content type and the load of an answer."""
    if isinstance(answer, EngineResponse):
        return answer.status, [answer.body] if answer.body else [], answer.content_type, answer.load
    status, parts, *rest = answer
    return status, parts, *(rest or [EVENTS]), b""


# ---- the client's side


@dataclass
class Asked:
    """A request, as it comes from a client."""

    path: str
    body: bytes
    headers: tuple = ()


def call(api=Api.COMPLETIONS, *, headers=(), **fields):
    prompt = {"prompt": "hi"} if api in (Api.COMPLETIONS,) else {"messages": []}
    return Asked(api.value, json.dumps(prompt | fields).encode(), headers)


class Response:
    """Implements ResponseWriter: writes down what it is told, and accepts nothing that has no place in an answer."""

    def __init__(self):
        self.keep_alive = True
        self.relay = None
        self.status = None
        self.lines = b""
        self.pieces = []  # in one write each
        self.streams = self.is_whole = False
        self.closed = asyncio.Event()
        self.on_write = lambda _: None  # of a piece of a stream

    @property
    def begun(self):
        return self.status is not None

    def begin(self, status, lines, body, *, streams, last=False):
        assert not self.begun
        assert not self.closed.is_set()
        self.status = status
        self.lines = lines
        self.streams = streams
        self.pieces.append(body)
        self.is_whole = not streams

    def write(self, piece, /):
        assert self.streams
        assert not self.is_whole
        assert piece
        self.pieces.append(piece)
        self.on_write(piece)

    def end(self, piece=b"", /):
        assert self.streams
        assert not self.is_whole
        self.is_whole = True
        self.pieces += [piece] if piece else []

    def close(self):
        assert not self.closed.is_set()
        self.closed.set()


class Client:
    """One request, and all that has become of it; ``sends``: in one piece, and at once."""

    def __init__(self, router, asked, name, *, sends=True):
        self.response = Response()
        self._router, self._name = router, RequestId(name)
        router.names.append(name)
        declared = () if b"content-type" in dict(asked.headers) else ((b"content-type", b"application/json"),)
        headers = ((b"host", b"localhost"), *declared, *asked.headers)
        self.request = Request(router.requests, self.response, asked.path, headers)
        if self.request.check() and sends:
            self.request.receive_body(asked.body, is_all=True)
        if sends:
            self.request.serve()

    async def end(self, *, seconds=20):
        """Wait for the end of the request."""
        async with asyncio.timeout(seconds):
            await self.response.closed.wait()
        self._router.telemetry.later.settle()
        return self

    def hang_up(self):
        self.request.leave()

    @property
    def is_over(self):
        return self.response.closed.is_set()

    @property
    def record(self):
        (record,) = self._router.ended[self._name]
        return record

    @property
    def status(self):
        return self.response.status

    @property
    def body(self):
        return b"".join(self.response.pieces)

    @property
    def got(self):
        """What a stream has brought until it was over, without the error that the router has put at its end."""
        return b"".join(self._shown)

    @property
    def error(self):
        """The type and the message of the error that the client was told; None: of none."""
        last = self.response.pieces[-1] if self.response.pieces else b""
        if self.response.streams:
            last = last.removeprefix(b"\ndata: ") if last.startswith(b'\ndata: {"error"') else b"{}"
        elif self.status == 200:
            return None
        if b"\n\n" in last.rstrip():  # several events: an engine's, which may begin with an error
            return None
        said = json.loads(last).get("error")
        return None if said is None else (said.get("type"), said.get("message"))

    @property
    def _shown(self):
        return self.response.pieces[:-1] if self.response.streams and self.error else self.response.pieces


# ---- the router between them


class Noted:
    """Implements Spans: writes down what becomes of each leg, and how each request ends."""

    def __init__(self):
        self.told = []
        self.requests = 0

    def request(self, record, headers, /):
        self.requests += 1
        return _NotedRequest(self, record)


class _NotedRequest:
    def __init__(self, notes, record):
        self._notes, self._record = notes, record

    def leg(self, instance, headers, /):
        return _NotedLeg(self._notes, instance.id, self._record.request_id), headers

    def handed_over(self):
        pass

    def end(self):
        self._notes.told.append(("over", self._record.request_id, self._record.status))


class _NotedLeg:
    def __init__(self, notes, instance, request):
        self._notes = notes
        self._who = (instance, request)
        notes.told.append(("began", *self._who))

    def answered(self, status):
        self._notes.told.append(("answered", *self._who))

    def end(self, error):
        self._notes.told.append(("ended", *self._who, None if error is None else failure_of(error)))


@dataclass
class Router:
    """What requests are served with, and what it has come to."""

    requests: RequestSet
    registry: Registry
    names: list  # of the requests to come
    ended: dict  # the records of the requests that are over, by their ids

    def __getattr__(self, name):
        services = self.requests.services
        return getattr(services if hasattr(services, name) else self.requests, name)

    @property
    def moves(self):
        """What moves streams, if a feature does."""
        return next(each for each in self.requests.watchers if hasattr(each, "cut_streams"))

    def start(self, asked=None, name="r", *, sends=True):
        """Send a request, or no more than its head."""
        return Client(self, asked or call(), name, sends=sends)

    async def serve(self, asked=None, name="r"):
        """Send a request, and wait for its end."""
        return await self.start(asked, name).end()

    def is_idle(self):
        """Tell whether nothing is held: no slot, no place, no byte of a body, and no request under way."""
        self.telemetry.later.settle()
        admission = self.gate.admission
        members = self.registry.members()
        held = admission.admitted, admission.waiting, admission.held_bytes, self.lifetime.in_flight
        return not any(held) and not any(member.load.in_flight for member in members) and not [*self.requests]


def router_of(
    engines,
    x=1,
    y=1,
    *,
    retries=2,
    mode=KvTransferMode.AUTO,
    clock=lambda: 0.0,
    budget=None,
    limits=None,
    settings=None,
    spans=None,
    told=(),
    breaking=NEVER_BROKEN,
    asks_for_models=False,
    watchers=None,
    **rules,
):
    """A router; ``rules``: more of the settings; ``asks_for_models``: what its engines serve decides, as in app.py.

    ``watchers``: in place of those that features make.
    """
    registry = Registry(breaking)
    for role, count in ((Role.PREFILL, x), (Role.DECODE, y)):
        for port in range(1, count + 1):
            registry.add(role, Address("http", "h", port))
    policy = TRANSFER_POLICIES[mode]
    settings = with_values(settings or Settings(), {"retries": retries, **rules})
    lifetime = Lifetime()
    ended = {}

    def keep(records):
        for record in records:
            ended.setdefault(record.request_id, []).append(record)

    learned = PushCoordinates(at_once=policy.at_once)
    telemetry = Telemetry(Counters(frozenset({*map(str, Api)})), clock, ended=[keep])
    added = all_features(settings, registry, clock)
    routing = [feature.routing() for feature in added]
    fleet = fleet_of(settings, registry, learned, clock, lambda _most: 0, added=routing, later=telemetry.later)
    claims = next((own for feature in added if (own := feature.claims()) is not None), None)
    openings = [own for feature in added if (own := feature.openings()) is not None] or [StreamOpenings()]
    names = []
    numbers = itertools.count()

    services = Services(
        intake=Intake(
            settings,
            lifetime,
            Keyring(),
            Sites(settings),
            sessions=SessionIds(()),
            model_of_unnamed=registry.models.of_unnamed if asks_for_models else None,
        ),
        fleet=fleet,
        push_coordinates=learned,
        leg_bodies=LegBodies(learned, policy, telemetry.replaced_host),
        sender=engines,
        releaser=Releaser(engines, (telemetry, *told)),
        budget=budget or RetryBudget(most=1000.0),
        gate=Gate(limits or Settings(), clock),
        lifetime=lifetime,
        body_reader=BodyReader(),
        telemetry=telemetry,
        good_legs=GoodLegs(telemetry.later, partial(count_legs, fleet, telemetry)),
        settings=LiveSettings(settings),
        clock=clock,
        new_id=lambda: RequestId(names.pop(0) if names else f"n{next(numbers)}"),
        new_transfer=new_transfer,
        openings=openings[0],
        spans=spans,
    )
    if watchers is None:
        watchers = [make for feature in added if (make := feature.watcher()) is not None]
    requests = RequestSet(services, claims, watchers)
    return Router(requests, registry, names, ended)


async def until(true, *, seconds=20):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)
