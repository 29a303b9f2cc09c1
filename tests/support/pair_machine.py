"""A decode and a prefill engine under everything that can happen to them, in any order.

The rules are what clients, operators and networks do. The invariants are what must hold whatever they do:
an answer is made from the right bytes, and every block comes back exactly once.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_connector.core.ids import ConnId
from pdrelay_connector.core.messages import DropLeases, ReadDone, ReadsStarted, RenewLeases
from pdrelay_connector.core.session.peers import MAX_BACKOFF, PeerState
from support.engines import BLOCKS, LEASE, TIMEOUT, World, right

MOST_TROUBLES = 2  # at a time: with more, nothing happens any more that could go wrong
PICK = st.integers(0, 1000)


STRANGER = ConnId(-1)


def vars_of(lease):
    return lease and (lease.expires_at, lease.state, lease.holder, lease.read_until, dict(lease.ranks_done))


class EngineMachine(RuleBasedStateMachine):
    """What happens to a prefill and a decode engine whoever moves the blocks, and what must hold."""

    @precondition(lambda self: self.loaded)
    @rule(pick=PICK)
    def answer(self, pick):
        """A request has its answer: its blocks are somebody else's next."""
        if self.can(self.world.d):
            request = self.pick(self.loaded, pick)
            del self.loaded[request]
            self.world.d.finish(request)

    @rule()
    def round(self):
        self.world.round()

    @rule(seconds=st.sampled_from([0.5, 4.0, LEASE / 3, LEASE, 3 * LEASE]))
    def wait(self, seconds):
        self.world.run(seconds=seconds, step=2.0)

    @rule(seconds=st.sampled_from([LEASE / 2, LEASE, 2 * LEASE]))
    def stall(self, seconds):
        """The whole machine is suspended: time passes and nobody has a turn."""
        self.world.now += seconds

    @invariant()
    def loaded_blocks_keep_their_bytes(self):
        """Nothing lands in blocks that belong to a request, late or by mistake."""
        for request, wanted in self.loaded.items():
            assert self.world.d.bytes_of(self.world.d.into[request]) == wanted, f"{request} has other bytes"

    @invariant()
    def every_block_has_one_owner(self):
        for engine in self.world.engines:
            owned = [engine.free, *engine.owned()]
            assert sorted(block for blocks in owned for block in blocks) == list(range(1, BLOCKS + 1))

    def d_starts(self):
        self.world.d.on_result = self.load_ended
        self.world.d.on_lost = self.lease_lost

    def can(self, engine):
        return engine.alive and not engine.frozen

    def pick(self, things, number):
        things = list(things)
        return things[number % len(things)]


class PairMachine(EngineMachine):
    """One prefill engine at a time, two decode engines, and a wire that lies in wait."""

    def __init__(self):
        super().__init__()
        self.serial = self.troubles = 0
        self.offers = {}  # request -> what P has said of it; the router's memory
        self.waiting = {}  # request -> offer: at D, wanted, not yet loading
        self.loaded = {}  # request -> the bytes it must keep until it is finished
        self.ended = set()

    @initialize(ranks=st.integers(1, 2), heads=st.integers(1, 2))
    def start(self, ranks, heads):
        """D has one rank; with one head, P's two keep the same."""
        self.p_is = {"ranks": ranks, "heads": heads}
        self.d_is = {"heads": heads, "timeout": 3 * LEASE}  # longer than a lease: only the fence can tell
        self.world = World(p=self.p_is, d=self.d_is)
        self.d_starts()

    # ---- what clients and the router do

    @rule(blocks=st.integers(1, 3))
    def lend(self, blocks):
        self.serial += 1
        if self.can(self.world.p) and (offer := self.world.lend(str(self.serial), blocks)):
            self.offers[str(self.serial)] = offer

    @precondition(lambda self: self.offers)
    @rule(pick=PICK, queues=st.booleans())
    def arrive(self, pick, queues):
        """The router hands an offer to D: a new one, one that was used, or one of an engine long dead."""
        if self.can(self.world.d):
            self.serial += 1
            request = str(self.serial)
            offer = self.pick(self.offers.values(), pick)
            self.world.start_renewing(offer, request)
            if queues or self.world.load(offer, request) is None:
                self.waiting[request] = offer

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def load(self, pick):
        if self.can(self.world.d):
            request = self.pick(self.waiting, pick)
            if self.world.load(self.waiting[request], request) is not None:
                del self.waiting[request]

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def abort(self, pick):
        """A client hangs up while its request queues."""
        if self.can(self.world.d):
            request = self.pick(self.waiting, pick)
            self.world.release(self.waiting.pop(request), request)

    # ---- P lacks blocks, and strangers

    @precondition(lambda self: self.world.p.held)
    @rule(pick=PICK)
    def revoke(self, pick):
        """Unless somebody has said to read it; whose word may be under way, or lost."""
        if self.can(self.world.p):
            request = self.pick(self.world.p.held, pick)
            if request in self.world.p.leases:
                self.world.p.revoke(request, now=self.world.now)

    @precondition(lambda self: self.world.p.leases._by_holder)
    @rule(pick=PICK, what=st.sampled_from([RenewLeases, DropLeases, ReadDone, ReadsStarted]))
    def meddle(self, pick, what):
        """An engine that has proven to be another says what is not its to say of a lease that D holds."""
        if not self.can(self.world.p):
            return
        leases = self.world.p.leases
        request = self.pick([name for names in leases._by_holder.values() for name in names], pick)
        message = ReadDone(request, request, 0, 1) if what is ReadDone else what((request,))
        before = vars_of(leases._leases[request])
        self.world.p.control.lease_manager._on_message(STRANGER, message, self.world.now)
        assert vars_of(leases._leases.get(request)) == before, "a stranger has changed a lease"

    # ---- what goes wrong

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(
        what=st.sampled_from(["freeze", "cut", "reset", "nixl hangs", "nixl clings"]),
        who=st.sampled_from("pd"),
        part=st.sampled_from(["link", "worker_link"]),
    )
    def trouble(self, what, who, part):
        self.troubles += 1
        engine = getattr(self.world, who)
        match what:
            case "freeze":
                engine.frozen = True
            case "cut":
                self.world.network.cut(getattr(engine, part), is_cut=True)
            case "reset":
                self.world.network.lose()
            case _:
                self.world.d.mover.stuck = True
                self.world.d.mover.clinging = what == "nixl clings"

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(what=st.sampled_from(["connection", "backend", "next backend"]))
    def breaks(self, what):
        """What D reads with is broken; another one may not be had either."""
        self.troubles += 1
        match what:
            case "connection":
                self.world.d.mover.lose(self.world.p.name)
            case "backend":
                self.world.d.mover.broken = True
            case _:
                self.world.d.builds_none = True

    @precondition(lambda self: self.troubles)
    @rule()
    def heal(self):
        self.troubles = 0
        for engine in self.world.engines:  # those that died as well: nobody waits for them behind a cut
            engine.frozen = False
            for link in (engine.link, engine.worker_link):
                self.world.network.cut(link, is_cut=False)
        self.world.d.builds_none = False
        for mover in self.world.d.movers:
            mover.stuck = mover.clinging = mover.broken = False

    @precondition(lambda self: self.world.network.in_flight())
    @rule(pick=PICK, what=st.sampled_from(["drop", "repeat", "delay"]))
    def tamper(self, pick, what):
        getattr(self.world.network, what)(pick % self.world.network.in_flight())

    @precondition(lambda self: self.serial > 5)
    @rule(who=st.sampled_from("pd"))
    def restart(self, who):
        self.serial += 1
        getattr(self.world, who).die()
        if who == "p":
            self.world.p = self.world.start(f"p{self.serial}", 5600, **self.p_is)
            return
        self.waiting, self.loaded, self.ended = {}, {}, set()
        self.world.d = self.world.start(f"d{self.serial}", 5700, **self.d_is)
        self.d_starts()

    # ---- what must hold

    def teardown(self):
        """Everything heals; then nothing may be left over, on either side."""
        if not hasattr(self, "world"):
            return
        self.heal()
        for request, offer in self.waiting.items():
            self.world.release(offer, request)
        self.world.run(seconds=3 * LEASE + TIMEOUT + 3 * MAX_BACKOFF, step=2.0)
        self.loaded_blocks_keep_their_bytes()
        for request in list(self.loaded):
            self.world.d.finish(request)
        for engine in (self.world.p, self.world.d):
            assert sorted(engine.free) == list(range(1, BLOCKS + 1)), f"{engine.name} lost blocks"
            assert engine.recovering.backends == 1, "a backend is kept that nothing uses"
            assert len(engine.leases) == len(engine.control.lease_renewer) == len(engine.reader) == 0
            assert engine.control.lease_renewer._leases_by_engine == {}
            for peers in (engine.peers, engine.worker_peers):
                known = {peer.engine for peer in peers._peers.values()}
                assert known <= {self.world.p.name}, "an engine that is gone is still known"
                assert all(peer.state is PeerState.CONNECTED for peer in peers._peers.values())
            assert set(engine.reader._remote_engines) <= {self.world.p.name}

    # ---- helpers

    def lease_lost(self, request):
        """What the engine thread does: a request that has not begun to load computes its own prompt."""
        self.waiting.pop(request.removeprefix("d-"), None)

    def load_ended(self, result):
        """What the engine thread does with a success: use the blocks."""
        request = result.request.removeprefix("d-")
        assert request not in self.ended, "a request ended twice"
        self.ended.add(request)
        if result.failure:
            return
        order = self.world.d.orders[result.request]
        (whole,) = order.token_ranges
        numbers, heads = range(len(whole.remote)), range(self.world.d.heads)
        wanted = [right(order.remote_request, number, head) for number in numbers for head in heads]
        assert self.world.d.bytes_of(whole.local) == wanted, "wrong bytes were called right"
        self.loaded[result.request] = wanted
