"""A fleet whose engines turn, drain, freeze and die, while streams begin, move and are left, in any order."""

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_connector.core.messages import FenceResult, ReadDone, ReadsStarted
from pdrelay_connector.core.session.peers import MAX_BACKOFF
from support.engines import BLOCK_SIZE
from support.push_machine import TAMPER
from support.scheduled_engine import LEASE, REGISTRATION, TRANSFER
from support.turning_fleet import MODES, Role, TurningFleet

# s within which a drained engine is empty, if nothing is wrong: what is lent, loaded or tried again has ended.
BOUND = REGISTRATION + TRANSFER + 2 * LEASE + MAX_BACKOFF
MOST_TROUBLES = 2  # at a time: with more, nothing happens any more that could go wrong
MOST_STREAMS = 10  # at a time
PICK = st.integers(0, 1000)
ROUNDS = st.integers(0, 4)
# A block of each letter, and some tokens more: prompts have common beginnings, and most end within a block.
PROMPTS = st.tuples(st.text("abc", min_size=1, max_size=4), st.integers(1, BLOCK_SIZE)).map(
    lambda parts: ["abc".index(letter) for letter in parts[0] for _ in range(BLOCK_SIZE)] + [0] * parts[1]
)
SEEN = ("loads", "leases_granted", "leases_expired", "leases_peer_lost")  # counters of scheduler processes
READS = dict.fromkeys((ReadsStarted, ReadDone, FenceResult), ("drop", "repeat", "delay"))


class TurningMachine(RuleBasedStateMachine):
    """Some engines of both roles, every pair of which may meet in any role and in either mode."""

    counts: ClassVar = Counter()  # of all examples

    def __init__(self):
        super().__init__()
        self.troubles = 0

    @initialize(
        roles=st.lists(st.sampled_from(Role), min_size=3, max_size=4),
        prompts=st.lists(st.tuples(PROMPTS, st.sampled_from(MODES)), min_size=2, max_size=4),
    )
    def start(self, roles, prompts):
        self.fleet = TurningFleet(roles)
        for prompt, mode in prompts:
            self.fleet.begin(prompt, 16, mode)
        self.rounds(4)

    # ---- what clients do

    @precondition(lambda self: sum(not stream.end for stream in self.fleet.streams) < MOST_STREAMS)
    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), most=st.integers(1, 20), mode=st.sampled_from(MODES),
          rounds=ROUNDS)  # fmt: skip
    def ask(self, prompts, most, mode, rounds):
        for prompt in prompts:
            self.fleet.begin(prompt, most, mode)
        self.rounds(rounds)

    @precondition(lambda self: self.open())
    @rule(pick=PICK, abandons=st.booleans())
    def leave(self, pick, abandons):
        self.fleet.leave(self.pick(self.open(), pick), abandons=abandons)

    # ---- what operators do

    @rule(pick=PICK, role=PICK, rounds=ROUNDS)
    def turn(self, pick, role, rounds):
        place = self.pick(self.fleet.places, pick)
        self.fleet.turn(place, self.pick([other for other in Role if other is not place.role], role))
        self.rounds(rounds)

    @rule(pick=PICK, to=PICK, prompt=PROMPTS, mode=st.sampled_from(MODES), rounds=ROUNDS)
    def move(self, pick, to, prompt, mode, rounds):
        """One of the streams that run; if there is none, one begins."""
        if not self.movable():
            self.fleet.begin(prompt, 16, mode)
            self.rounds(5)
        if movable := self.movable():
            stream = self.pick(movable, pick)
            if able := self.fleet.able(Role.DECODE, but=(stream.decode.engine,)):
                self.fleet.move(stream, self.pick(able, to))
        self.rounds(rounds)

    @rule(pick=PICK, moves=st.booleans(), rounds=ROUNDS)
    def drain(self, pick, moves, rounds):
        self.fleet.drain(self.pick(self.fleet.places, pick), moves=moves)
        self.rounds(rounds)

    @precondition(lambda self: any(place.drained_at is not None for place in self.fleet.places))
    @rule(pick=PICK)
    def undrain(self, pick):
        drained = [place for place in self.fleet.places if place.drained_at is not None]
        self.pick(drained, pick).drained_at = None

    @precondition(lambda self: self.empty())
    @rule(pick=PICK, rounds=ROUNDS)
    def replace(self, pick, rounds):
        """A rollout: a process that is shown as empty ends."""
        self.fleet.replace(self.pick(self.empty(), pick))
        self.rounds(rounds)

    # ---- time

    @rule(rounds=st.integers(1, 8))
    def go_on(self, rounds):
        self.rounds(rounds)

    @rule(seconds=st.sampled_from([0.5, 4.0, LEASE / 3, LEASE]))
    def wait(self, seconds):
        self.fleet.run(seconds, step=4.0)

    @rule(seconds=st.sampled_from([LEASE / 2, LEASE]))
    def stall(self, seconds):
        """The whole machine is suspended: time passes and nobody has a turn."""
        self.fleet.now += seconds

    # ---- what goes wrong

    @precondition(lambda self: self.open())
    @rule(pick=PICK, rounds=ROUNDS)
    def die(self, pick, rounds):
        self.fleet.die(self.pick(self.fleet.places, pick))
        self.rounds(rounds)

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(what=st.sampled_from(["freeze", "cut", "cut one", "reset", "hang", "cling"]), pick=PICK, rounds=ROUNDS)
    def trouble(self, what, pick, rounds):
        fleet = self.fleet
        engine = self.pick(fleet.living, pick)
        fleet.counts[what] += 1
        self.troubles += 1
        match what:
            case "freeze":
                engine.frozen = True
            case "cut" | "cut one":
                for link in engine.links if what == "cut" else [self.pick(engine.links, pick)]:
                    fleet.network.cut(link, is_cut=True)
                fleet.cut_at = fleet.now if fleet.cut_at is None else fleet.cut_at
            case "reset":
                fleet.network.lose()
            case _:
                for mover in engine.movers:
                    mover.stuck = True
                    mover.clinging = what == "cling"
        self.rounds(rounds)

    @precondition(lambda self: self.fleet.cut_at is not None)
    @rule()
    def time_out(self):
        """TCP gives up, on both sides: neither knows whether the other lives."""
        self.fleet.network.time_out()

    @precondition(lambda self: self.troubles)
    @rule()
    def heal(self):
        self.troubles = 0
        self.fleet.heal()

    @precondition(lambda self: self.fleet.network.in_flight())
    @rule(pick=PICK, what=st.integers(0, 2))
    def tamper(self, pick, what):
        network = self.fleet.network
        number = pick % network.in_flight()
        if ways := (TAMPER | READS).get(type(network.peek(number))):
            self.fleet.counts["tampered"] += 1
            getattr(network, ways[what % len(ways)])(number)

    # ---- what must hold

    @invariant()
    def every_block_and_lease_has_its_owners(self):
        if hasattr(self, "fleet"):
            self.fleet.check()
            self.fleet.counts["mixed leases"] += self.fleet.has_mixed_leases

    def teardown(self):
        """Everything heals; then every request ends, and nothing is left over."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        self.heal()
        for place in fleet.places:  # whatever was drained may stay so
            place.drained_at = fleet.now if place.drained_at is None else place.drained_at
        self.run_dry()
        fleet.check()
        left = self.open()
        assert not left, f"requests without an end: {left}"
        assert all(stream.end in ("right", "left", "error") for stream in fleet.streams)
        assert all(engine.is_empty for engine in fleet.living), "a drained engine is not empty"
        fleet.run(2 * REGISTRATION, step=20.0)
        names = {engine.name for engine in fleet.living}
        for engine in fleet.living:
            engine.check()
            engine.check_is_at_rest(names)
        for engine in fleet.living:
            fleet.counts.update({name: engine.connector.seen[name] for name in SEEN})
        self.counts.update(fleet.counts)

    # ---- helpers

    def run_dry(self):
        """Let all end that must. A request that lacks quarantined blocks waits for them, and then begins.

        A quarantine lasts for some number of looks (core/push/lost_peer.py), here one for each step of the time.
        """
        fleet, since = self.fleet, self.fleet.now
        while fleet.now < since + BOUND and fleet.now < 1e5:
            fleet.run()
            if fleet.is_quarantined:
                since = fleet.now
            fleet.now += 10.0 if fleet.is_quarantined else 5.0
        fleet.run()

    def rounds(self, number):
        for _ in range(number):
            self.fleet.round()

    def open(self):
        return [stream for stream in self.fleet.streams if not stream.end]

    def movable(self):
        return [stream for place in self.fleet.places for stream in self.fleet.at(place.engine)]

    def empty(self):
        return [
            place
            for place in self.fleet.places
            if place.drained_at is not None and place.engine.is_empty and not place.engine.frozen
        ]

    def pick(self, things, number):
        return things[number % len(things)]
