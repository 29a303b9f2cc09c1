"""A fleet of engines that turn, and the router that sends streams to them, moves them and lets clients leave.

The router is played: its own rules have tests of their own (``tests/proxy``). What it may do is what the real one does,
and what it may believe is what engines show it.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from pdrelay_connector.core.ids import Address
from support.engines import BLOCK_SIZE, Turns
from support.in_memory import InMemoryNetwork
from support.push_engines import Stray
from support.scheduled_engine import ScheduledEngine, next_token

STRAYS = 10  # turns a living engine needs to take in what a dead one had sent
MOVE_TIMEOUT = 10.0  # s that the engine which a stream leaves has for its part
MODES = ("pull", "push", "push_cold")  # the last: P goes first, and is told to push all the same


class Role(Enum):
    """What the router sends to an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass
class Leg:
    """One request at one engine."""

    name: str
    engine: ScheduledEngine
    tokens: list  # its prompt
    transfer: str
    of_move: bool = False
    at: float = 0.0  # when it was sent
    is_over: bool = False


@dataclass
class Stream:
    """A client's request: ``prompt`` and ``said`` are its tokens, ``prefill`` and ``decode`` its legs."""

    name: str
    prompt: list
    most: int
    mode: str
    said: list = field(default_factory=list)
    prefill: Leg | None = None
    decode: Leg | None = None
    target: ScheduledEngine | None = None  # the decode engine that is to go on, while its prefill lasts
    moves: bool = False  # from one engine to another, until the first token there
    end: str = ""

    @property
    def tokens(self):
        return [*self.prompt, *self.said]


class Place:
    """Where an engine runs: a process that dies is followed by another one, at the same address."""

    def __init__(self, fleet, number, role):
        self.fleet = fleet
        self.number = number
        self.role = role
        self.address = Address("10.0.0.1", 5600 + number)
        self.drained_at = None
        self.start()

    def start(self):
        self.engine = self.fleet.start(f"e{self.number}-{self.fleet.next()}", self.address)
        self.drained_at = None

    @property
    def serves(self):
        return self.engine.alive and self.drained_at is None


class TurningFleet(Turns):
    """Some places with engines, stepped together."""

    def __init__(self, roles):
        self.network = InMemoryNetwork()
        self.now = 0.0
        self.cut_at = None
        self.serial = 0
        self.addresses = {}
        self.cached = {}
        self.engines = []
        self.strays = []
        self.counts = Counter()
        self.streams = []
        self.legs = {}
        self.places = [Place(self, number, role) for number, role in enumerate(roles)]

    # ---- the network and the engines

    def next(self):
        self.serial += 1
        return self.serial

    def start(self, name, address):
        engine = ScheduledEngine(self, name, address)
        self.engines.append(engine)
        return engine

    def stray(self, mover, flight):
        return Stray(mover, flight, self.now)

    def check_write(self, memory, pieces, reader):
        """Fail if bytes arrive in blocks that nobody uses."""
        engine = next(engine for engine in self.engines if engine.name == memory)
        free = [piece // BLOCK_SIZE for piece in pieces if not engine.pool.blocks[piece // BLOCK_SIZE].ref_cnt]
        assert not free, f"bytes arrived in free blocks of {memory}: {free}"

    def round(self):
        """Let every message in flight arrive, and every engine have one turn."""
        self.network.deliver()
        for engine in [engine for engine in self.engines if engine.alive]:
            for output in engine.turn(self.now):
                self.heard(engine, output)
        for stray in list(self.strays):
            self._arrive(stray)
        for stream in self.streams:
            self._look_at_clock(stream)

    def _arrive(self, stray):
        """As in support.push_engines: what a dead process had sent arrives a little later, or never."""
        owner = next(engine for engine in self.engines if engine.name == stray.target)
        if not owner.alive or (self.cut_at is not None and self.now >= stray.ends_at):
            self.strays.remove(stray)
        elif self.network.reachable(stray.target) and not owner.frozen:
            stray.turns += 1
            if stray.turns >= STRAYS:
                self.strays.remove(stray)
                self.check_write(stray.target, stray.bytes, None)
                for place, data in stray.bytes.items():
                    self.network.memories[stray.target][place] = data

    @property
    def living(self):
        return [place.engine for place in self.places if place.engine.alive]

    def check(self):
        for engine in self.living:
            engine.check()

    # ---- the router: who may get what

    def able(self, role, *, but=()):
        """Return the engines that may get a leg of a role."""
        return [
            place.engine
            for place in self.places
            if place.serves and place.role in (role, Role.BOTH) and place.engine not in but
        ]

    def choose(self, role, *, but=()):
        able = self.able(role, but=but)
        return able[self.next() % len(able)] if able else None

    # ---- the router: the life of a stream

    def begin(self, prompt, most, mode):
        stream = Stream(f"s{self.next()}", prompt, most, mode)
        self.streams.append(stream)
        self.serve(stream)
        return stream

    def serve(self, stream):
        """Send what is left of a stream to a pair, or to one engine alone."""
        decode = self.choose(Role.DECODE) or self.choose(Role.PREFILL)
        if decode is None:
            self.finish(stream, "error")
            return
        prefill = self.choose(Role.PREFILL, but=(decode,))
        if prefill is None:
            self._decode_alone(stream, decode)
        else:
            self._pair(stream, prefill, decode)

    def _pair(self, stream, prefill, decode, *, of_move=False):
        transfer = f"t{self.next()}"
        params = {"do_remote_decode": True, "transfer_id": transfer}
        if stream.mode != "pull":
            params["transfer_mode"] = "push"
        stream.target = decode
        stream.prefill = self._send(stream, prefill, transfer, most=1, params=params, of_move=of_move)
        if stream.mode == "push":
            place = prefill.address
            params = {
                "do_remote_prefill": True,
                "remote_engine_id": prefill.name,
                "remote_host": place.host,
                "remote_port": place.port,
                "transfer_id": transfer,
                "transfer_mode": "push",
            }
            self._decode(stream, transfer, params)

    def _decode_alone(self, stream, engine):
        stream.target = engine
        self._decode(stream, f"t{self.next()}", None)

    def _decode(self, stream, transfer, params):
        engine = stream.target
        stream.target = None
        left = stream.most - len(stream.said)
        stream.decode = self._send(stream, engine, transfer, most=left, params=params)

    def _send(self, stream, engine, transfer, *, most, params, of_move=False):
        leg = Leg(f"{stream.name}-{self.next()}", engine, stream.tokens, transfer, of_move, self.now)
        self.legs[leg.name] = stream, leg
        engine.ask(leg.name, leg.tokens, most=most, params=params)
        return leg

    def _drop(self, leg):
        """Close a leg's connection, if there is one."""
        if leg is not None and not leg.is_over:
            leg.is_over = True
            del self.legs[leg.name]
            leg.engine.abort(leg.name)

    def heard(self, engine, output):
        """An engine has answered, perhaps to nobody."""
        stream, leg = self.legs.get(output.request, (None, None))
        if output.params is not None and stream is not None and leg is stream.prefill:
            engine.note_offer(output, leg.tokens)
        if stream is None:
            return
        if leg is stream.prefill:
            self._prefilled(stream, leg, output)
        else:
            self._said(stream, leg, output)

    def _prefilled(self, stream, leg, output):
        self._over(leg)
        stream.prefill = None
        self.counts["offers"] += output.params is not None
        if stream.decode is None:
            self._decode(stream, leg.transfer, output.params)
            self._offered(stream, leg)

    def _offered(self, stream, leg):
        """A decode leg that meets an engine which has died since, or which cannot be reached."""
        if not stream.decode.engine.alive:
            self.lost(stream, stream.decode)

    def _said(self, stream, leg, output):
        for token in output.tokens:
            assert token == next_token(stream.tokens), f"{stream.name} has another text"
            stream.said.append(token)
        if output.tokens and stream.moves:
            stream.moves = False
            self.counts["moved"] += 1
        if output.end is not None:
            self._over(leg)
            stream.decode = None
            if len(stream.said) == stream.most:
                self.finish(stream, "right")
            else:
                self.finish(stream, f"ended by {leg.engine.name}: {output.end}")

    def _over(self, leg):
        leg.is_over = True
        del self.legs[leg.name]

    def finish(self, stream, end):
        stream.end = end
        self._drop(stream.prefill)
        self._drop(stream.decode)
        stream.prefill = stream.decode = stream.target = None
        self.counts[f"ended {end}"] += 1

    def leave(self, stream, *, abandons):
        """The client hangs up; a router that knows of a lease nobody will read may say so."""
        leg = stream.prefill or stream.decode
        self.finish(stream, "left")
        if abandons and leg is not None and leg.engine.alive:
            params = {"abandoned_transfer_id": leg.transfer}
            leg.engine.ask(f"{stream.name}-{self.next()}", [0], most=1, params=params)

    def move(self, stream, to):
        """Cut a stream: the engine that it leaves prefills for the one that it goes to."""
        leg = stream.decode
        self._drop(leg)
        stream.decode, stream.moves = None, True
        self.counts["moves"] += 1
        if stream.mode == "push" and self.next() % 2:
            stream.mode = "push_cold"
        self._pair(stream, leg.engine, to, of_move=True)

    def _look_at_clock(self, stream):
        leg = stream.prefill
        if leg is not None and leg.of_move and self.now >= leg.at + MOVE_TIMEOUT:
            self.counts["moves not answered"] += 1
            self._again(stream)

    def _again(self, stream):
        """Send a stream to another pair: its prefill has failed."""
        self._drop(stream.prefill)
        self._drop(stream.decode)
        stream.prefill = stream.decode = stream.target = None
        self.serve(stream)

    def lost(self, stream, leg):
        """A leg's engine has died."""
        self._over(leg)
        self.counts["legs lost"] += 1
        if leg is stream.prefill and stream.decode is not None:
            stream.prefill = None  # the decode engine computes what it does not get
            return
        if leg is stream.prefill:
            stream.prefill = None
        else:
            stream.decode = None
        self._again(stream)

    # ---- what operators do, and what happens

    def turn(self, place, role):
        """The engine gets new requests of the other role only; what it has lent and taken goes on."""
        place.role = role
        self.counts["turns"] += 1
        self.counts["turns with leases"] += bool(len(place.engine.leases))
        self.counts["turns with loads"] += bool(place.engine.decodes._remote_prefills)

    def drain(self, place, *, moves):
        """Nothing new goes to the engine; its streams may leave it."""
        if place.drained_at is None:
            place.drained_at = self.now
        self.counts["drains"] += 1
        if moves:
            for stream in self.at(place.engine):
                if (to := self.choose(Role.DECODE, but=(place.engine,))) is not None:
                    self.move(stream, to)

    def at(self, engine):
        """Return the streams that run at an engine and can move."""
        return [
            stream
            for stream in self.streams
            if not stream.end and stream.decode and stream.decode.engine is engine and stream.prefill is None
            and stream.said and not stream.moves
        ]  # fmt: skip

    def die(self, place):
        """The process ends; its clients see that at once, and a new one comes up at the address."""
        engine = place.engine
        self.counts["deaths"] += 1
        self.counts["deaths with leases"] += bool(len(engine.leases))
        self.counts["deaths with loads"] += bool(engine.decodes._remote_prefills)
        engine.die()
        place.start()
        for stream, leg in list(self.legs.values()):
            if leg.engine is engine and self.legs.get(leg.name) is not None:
                self.lost(stream, leg)

    def replace(self, place):
        """End a process that is drained and shown as empty: nobody may notice.

        The end of a lease is shown at once. The thread that pushes hears of it with the next step, and remembers the
        blocks until its turn after that, though nothing waits for them: a push counts only while its lease is held.
        A router looks twice (docs/instances.md), so both have had their turn in between.
        """
        engine = place.engine
        for _ in range(2):
            held = list(engine.prefills._held_blocks._leases)
            assert not held, f"{engine.name} is shown as empty, and lends {held}"
            assert engine.turn(self.now) == [], f"{engine.name} is shown as empty, and answers"
        assert not (known := list(engine.writer._sources)), f"{engine.name} is shown as empty, and writes {known}"
        assert not [leg for _, leg in self.legs.values() if leg.engine is engine]
        self.counts["replaced"] += 1
        self.die(place)

    def heal(self):
        """End whatever was wrong."""
        self.cut_at = None
        for engine in self.engines:
            engine.frozen = False
            for link in engine.links:
                self.network.cut(link, is_cut=False)
            for mover in engine.movers:
                mover.stuck = mover.clinging = False

    @property
    def is_quarantined(self):
        return any(engine.decodes._quarantined for engine in self.living)

    @property
    def has_mixed_leases(self):
        """Whether one engine lends to be read, and pushes, at the same time."""
        return any(
            {name.startswith("t") for name in engine.prefills._held_blocks._leases} == {True, False}
            for engine in self.living
        )
