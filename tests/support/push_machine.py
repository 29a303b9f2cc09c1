"""A prefill engine that pushes and a decode engine under everything that can happen to them, in any order.

The rules are what clients, operators and networks do. The invariants are what must hold whatever they do: nothing is
written into a block after it was taken back (every copy checks that), an answer is made from the right bytes, and
every block comes back exactly once.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from pdrelay_connector.core.messages import (
    CancelPushes,
    DropLeases,
    HeartbeatReply,
    LeasesLost,
    PushDone,
    PushStalled,
    PushStopped,
    RegisterPush,
    RenewLeases,
)
from pdrelay_connector.core.session.peers import MAX_BACKOFF, PeerState
from support.engines import BLOCK_SIZE, BLOCKS, LEASE, lent
from support.pair_machine import MOST_TROUBLES, PICK, STRANGER, EngineMachine
from support.push_engines import WAIT, PushWorld

# What TCP does not do to a connection that lives is done here all the same, where the protocol can bear it. It cannot:
# - losing a RegisterPush, Memory, CancelPushes, PushStopped or PushDone: each is said once, and somebody waits for it;
# - a RegisterPush that arrives twice or late: P would write for a reader who has been answered;
# - a Memory that arrives late: registrations before it are refused.
TAMPER = {
    RenewLeases: ("drop", "repeat", "delay"),
    HeartbeatReply: ("drop", "repeat", "delay"),
    LeasesLost: ("drop", "repeat", "delay"),
    DropLeases: ("drop", "repeat", "delay"),
    PushStalled: ("drop", "repeat", "delay"),
    CancelPushes: ("repeat", "delay"),
    PushStopped: ("repeat", "delay"),
    PushDone: ("repeat", "delay"),
}


class PushMachine(EngineMachine):
    """One prefill engine at a time, one decode engine, and a wire that lies in wait."""

    def __init__(self):
        super().__init__()
        self.serial = self.troubles = 0
        self.transfers = {}  # name -> (the engine the router chose, blocks, prompt); the router's memory
        self.waiting = {}  # request -> transfer: at D, wanted, blocks not yet allocated
        self.loaded = {}  # request -> the bytes it must keep until it is finished
        self.ended = set()

    @initialize(ranks=st.integers(1, 2), d_ranks=st.integers(1, 2), heads=st.integers(1, 2))
    def start(self, ranks, d_ranks, heads):
        self.world = PushWorld(ranks=ranks, d_ranks=d_ranks, heads=heads)
        self.d_starts()

    # ---- what clients and the router do: both legs leave at once, and either may be first

    @rule(blocks=st.integers(1, 3), legs=st.sampled_from(["p", "d", "pd", "dp"]), done=st.integers(0, 3))
    def route(self, blocks, legs, done):
        """A new prompt; ``done`` of its blocks are computed in the first step."""
        name = f"t{self.next()}"
        self.transfers[name] = self.world.p, blocks, f"prompt of {name}"
        for leg in legs:
            if leg == "d" and self.can(self.world.d):
                self.arrive(name, queues=False, first=0)
            elif leg == "p" and self.can(self.world.p):
                assert self.world.p.begin(name, blocks, f"prompt of {name}")
                self.world.p.compute(name, done)

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK)
    def prefill_arrives(self, pick):
        """For the first time, or again: a router that tries again may use the same name."""
        name = self.pick(self.transfers, pick)
        engine, blocks, prompt = self.transfers[name]
        if engine is self.world.p and self.can(engine):
            engine.begin(name, blocks, prompt)

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, queues=st.booleans(), first=st.integers(0, 1))
    def decode_arrives(self, pick, queues, first):
        """Also several of one transfer, and for an engine long dead."""
        if self.can(self.world.d):
            self.arrive(self.pick(self.transfers, pick), queues, first)

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK, first=st.integers(0, 1))
    def add(self, pick, first):
        """Some of the prompt may be in the local prefix cache."""
        if self.can(self.world.d):
            request = self.pick(self.waiting, pick)
            if self.expect(request, self.waiting[request], first):
                del self.waiting[request]

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def abort_waiting(self, pick):
        if self.can(self.world.d):
            request = self.pick(self.waiting, pick)
            self.release(request)

    @precondition(lambda self: len(self.world.d.push_receiver))
    @rule(pick=PICK)
    def abort_loading(self, pick):
        if self.can(self.world.d):
            self.world.stop(self.pick(self.world.d.push_receiver._pushes, pick))

    @precondition(lambda self: self.serial % 5 == 4)
    @rule(pick=PICK)
    def mix_up(self, pick):
        """Something hands a request the name of another's transfer."""
        if self.transfers and self.can(self.world.d):
            request = f"r{self.next()}"
            name = self.pick(self.transfers, pick)
            engine, blocks, _ = self.transfers[name]
            self.world.d.start_renewing(request, name, engine, now=self.world.now)
            if not self.world.d.expect(request, name, engine, blocks, now=self.world.now, prompt="another"):
                self.waiting[request] = name

    # ---- what P's scheduler does

    @precondition(lambda self: self.world.p.computing)
    @rule(pick=PICK, blocks=st.integers(0, 2))
    def chunk(self, pick, blocks):
        if self.can(self.world.p):
            self.world.p.compute(self.pick(self.world.p.computing, pick), blocks)

    @precondition(lambda self: self.world.p.computing)
    @rule(pick=PICK)
    def preempt(self, pick):
        if self.can(self.world.p):
            self.world.p.preempt(self.pick(self.world.p.computing, pick))

    @precondition(lambda self: self.world.p.computing)
    @rule(pick=PICK)
    def lend(self, pick):
        if self.can(self.world.p):
            self.world.p.lend(self.pick(self.world.p.computing, pick), now=self.world.now)

    @precondition(lambda self: self.world.p.held)
    @rule(pick=PICK)
    def revoke(self, pick):
        """P lacks blocks; what is written to somebody it keeps."""
        p = self.world.p
        if self.can(p) and (name := self.pick(p.held, pick)) in p.leases:
            p.revoke(name, now=self.world.now)
            assert name not in p.leases or name in p.push_coordinator._by_request, (
                "what nobody is written to was not revoked"
            )

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, what=st.sampled_from([RenewLeases, DropLeases, RegisterPush]))
    def meddle(self, pick, what):
        """An engine that is another's speaks of a transfer that somebody has spoken of."""
        pushes = self.world.p.push_coordinator
        name = self.pick(self.transfers, pick)
        if not self.can(self.world.p) or (owner := pushes._owner(name)) is None:
            return
        message = RegisterPush("x", name, None, lent(0, [1])) if what is RegisterPush else what((name,))
        lease = self.world.p.leases._leases.get(name)
        expires_at = lease and lease.expires_at
        pushes._on_message(STRANGER, message, self.world.now)
        assert pushes._owner(name) == owner, "a stranger has taken a transfer"
        assert self.world.p.leases._leases.get(name) is lease, "a stranger has ended a lease"
        assert (lease and lease.expires_at) == expires_at, "a stranger has renewed a lease"

    @precondition(lambda self: self.world.p.computing)
    @rule(pick=PICK)
    def abort_prefill(self, pick):
        if self.can(self.world.p):
            self.world.p.abandon(self.pick(self.world.p.computing, pick))

    # ---- time

    @rule()
    def talk(self):
        """Long enough for everything that is said to be answered."""
        self.world.run()

    # ---- what goes wrong

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(
        what=st.sampled_from(
            ["freeze", "busy", "cut control", "cut bytes", "cut both", "reset", "worker", "hang", "cling"]
        ),
        who=st.sampled_from("pd"),
    )
    def trouble(self, what, who):
        self.troubles += 1
        engine = getattr(self.world, who)
        match what.split():
            case ["freeze"]:
                engine.frozen = True
            case ["busy"]:
                self.world.p.is_busy = True
            case ["cut", part]:
                self.world.cut(engine, part)
            case ["reset"]:
                self.world.network.lose()
            case ["worker"]:
                self.world.network.lose_scheduler(engine.worker_links[self.troubles % engine.ranks])
            case _:
                for mover in self.world.p.movers:
                    mover.stuck = True
                    mover.clinging = what == "cling"

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(what=st.sampled_from(["connection", "backend"]))
    def breaks(self, what):
        """What P's workers write with."""
        self.troubles += 1
        for mover in self.world.p.movers:
            if what == "connection":
                mover.lose(f"{self.world.d.name}/0")
            else:
                mover.broken = True

    @precondition(lambda self: self.world.cut_at is not None)
    @rule()
    def time_out(self):
        """TCP gives up, on both sides: neither knows whether the other lives."""
        self.world.network.time_out()

    @precondition(lambda self: self.troubles)
    @rule()
    def heal(self):
        self.troubles = 0
        self.world.heal()

    @precondition(lambda self: self.world.network.in_flight())
    @rule(pick=PICK, what=st.integers(0, 2))
    def tamper(self, pick, what):
        number = pick % self.world.network.in_flight()
        if remote_ranks := TAMPER.get(type(self.world.network.peek(number))):
            getattr(self.world.network, remote_ranks[what % len(remote_ranks)])(number)

    @precondition(lambda self: self.serial > 5)
    @rule(who=st.sampled_from("pd"))
    def restart(self, who):
        getattr(self.world, who).die()
        if who == "p":
            self.world.p = self.world.start(f"p{self.next()}", 5600)
            return
        self.waiting, self.loaded, self.ended = {}, {}, set()
        self.world.d = self.world.start(f"d{self.next()}", 5700)
        self.d_starts()

    # ---- what must hold

    def teardown(self):
        """Everything heals; then nothing may be left over, on either side."""
        if not hasattr(self, "world"):
            return
        self.heal()
        for request in list(self.waiting):
            self.release(request)
        for name in list(self.world.p.computing):
            self.world.p.abandon(name)
        self.world.run(seconds=3 * LEASE + 2 * WAIT + 3 * MAX_BACKOFF, step=5.0)
        self.loaded_blocks_keep_their_bytes()
        self.world.run(seconds=1200, step=10.0)  # the long quarantine
        self.loaded_blocks_keep_their_bytes()
        for request in list(self.loaded):
            self.world.d.finish(request)
        for engine in (self.world.p, self.world.d):
            nothing_is_left(engine)
            known = {peer.engine for peer in engine.peers._peers.values()}
            assert known <= {self.world.p.name}, "an engine that is gone is still known"
            assert all(peer.state is PeerState.CONNECTED for peer in engine.peers._peers.values())

    # ---- helpers

    def next(self):
        self.serial += 1
        return self.serial

    def lease_lost(self, request):
        """What the engine thread does: a request that has not registered computes its own prompt."""
        self.waiting.pop(request, None)

    def load_ended(self, result):
        """What the engine thread does with a success: use the blocks."""
        assert result.request not in self.ended, "a request ended twice"
        self.ended.add(result.request)
        if result.failure:
            return
        ticket = self.world.d.tickets[result.request]
        assert ticket.prompt != "another", "a request got another prompt's KV"
        (lent,) = ticket.groups
        numbers = range(lent.start // BLOCK_SIZE, lent.stop // BLOCK_SIZE)
        right = self.world.right_bytes(ticket.remote_request, numbers)
        assert self.world.d.bytes_of(lent.blocks) == right, "wrong bytes were called right"
        self.loaded[result.request] = right

    def arrive(self, name, queues, first):
        request = f"r{self.next()}"
        self.world.d.start_renewing(request, name, self.transfers[name][0], now=self.world.now)
        if queues or not self.expect(request, name, first):
            self.waiting[request] = name

    def expect(self, request, name, first):
        engine, blocks, prompt = self.transfers[name]
        first = min(first, blocks - 1)
        into = self.world.d.expect(request, name, engine, blocks, now=self.world.now, first=first, prompt=prompt)
        return into is not None

    def release(self, request):
        engine = self.transfers[self.waiting.pop(request)][0]
        self.world.d.control.lease_renewer.release(request, engine.name)


def nothing_is_left(engine):
    """All tables of an engine at rest are empty."""
    assert sorted(engine.free) == list(range(1, BLOCKS + 1)), f"{engine.name} lost blocks"
    assert engine.lent == {}
    assert len(engine.leases) == len(engine.control.lease_renewer) == len(engine.push_receiver) == 0
    assert engine.control.lease_renewer._leases_by_engine == {}
    assert engine.push_coordinator._by_request == engine.push_coordinator._remembered._early == {}
    assert engine.push_coordinator._draining == {}
    assert all(peer.pushes == {} for peer in engine.push_coordinator._peers.values())
    for writer in engine.writers:
        assert writer._sources == writer._jobs == writer._by_request == writer._by_part == {}
        assert writer._part_writer._parts == writer._part_writer._transfers._steps == {}
        assert not writer._awaiting_device
        assert writer._peers.keys() == engine.push_coordinator._peers.keys()
        assert writer._transfer_agent._transfers == {}
        assert writer._transfer_agent.backends == 1, "a backend is kept that nothing uses"
