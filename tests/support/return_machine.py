"""A prefill engine that asks two salts' worth of prompts of a decode engine whose cache changes all the time."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.messages import FindPrefix
from support.engines import BLOCK_SIZE, BLOCKS, LEASE
from support.returning import ReturningWorld, chain, pack

# A block of each of these letters: prompts that share beginnings, and differ anywhere.
PROMPTS = st.text("ab", min_size=1, max_size=3).map(
    lambda text: [ord(each) for each in text for _ in range(BLOCK_SIZE)]
)
SALTS = st.sampled_from([None, "other"])
PICK = st.integers(0, 1000)
SETTLES = st.sampled_from([True, True, False])  # whether all messages arrive before anything else happens
MOST_TROUBLES = 1


class ReturnMachine(RuleBasedStateMachine):
    """What clients, vLLM's caches and the network do, in any order; never is a byte read that is not the prompt's."""

    def __init__(self):
        super().__init__()
        self.serial = self.troubles = self.right = 0
        self.asked = {}  # request -> names of the blocks that it needs

    @initialize(mode=st.sampled_from(["pull", "push"]))
    def start(self, mode):
        self.world = ReturningWorld(mode)

    @rule(tokens=PROMPTS, salt=SALTS)
    def schedule(self, tokens, salt):
        """D computes a prompt, or an answer."""
        if self.can(self.world.d):
            self.world.d.schedule(tokens, salt)

    @rule(settles=SETTLES)
    def end_step(self, settles):
        if self.can(self.world.d):
            self.world.d.end_step()
            self.settle(settles)

    @rule(settles=SETTLES)
    def look_up(self, settles):
        if self.can(self.world.d):
            self.world.d.look_up(now=self.world.now)
            self.settle(settles)

    @precondition(lambda self: self.world.d.cache)
    @rule(pick=PICK)
    def evict(self, pick):
        names = list(self.world.d.cache)
        if self.can(self.world.d):
            self.world.d.evict(names[pick % len(names)])

    @precondition(lambda self: self.world.d.pinned)
    @rule(pick=PICK)
    def revoke(self, pick):
        """D lacks blocks: leases of cached ones go first."""
        leases = list(self.world.d.pinned)
        if self.can(self.world.d):
            lease = leases[pick % len(leases)]
            self.world.d.held[lease] = self.world.d.pinned[lease]
            self.world.d.revoke(lease, now=self.world.now)
            del self.world.d.held[lease]

    @rule(tokens=PROMPTS, salt=SALTS, looks=st.booleans(), settles=SETTLES)
    def search(self, tokens, salt, looks, settles):
        """A prefill of P whose prompt goes on behind the tokens; D may look at once."""
        if self.can(self.world.p):
            self.serial += 1
            request = f"r{self.serial}"
            self.asked[request] = chain(FindPrefix(RequestId(""), pack(tokens), salt))
            self.world.p.search(request, [*tokens, 1], salt, self.world.d, now=self.world.now)
            self.settle(settles)
            if looks:
                self.look_up(settles)

    @rule(tokens=PROMPTS, salt=SALTS, other=SALTS, steps=st.booleans(), settles=SETTLES, loads=st.booleans())
    def turn(self, tokens, salt, other, steps, settles, loads):
        """A chat has an answer at D, and its next turn comes to P; or that of another tenant with the same words."""
        self.meet()
        self.settle(settles)
        self.schedule(tokens, salt)
        if steps:
            self.end_step(settles)
        self.search(tokens, other, True, settles)
        if loads:
            self.load(self.serial, settles)

    @precondition(lambda self: self.asked)
    @rule(pick=PICK)
    def cancel(self, pick):
        """A client leaves."""
        request = self.pick(pick)
        if self.can(self.world.p) and RequestId(request) not in self.world.p.into:
            self.end(request)

    @precondition(lambda self: self.world.p.found)
    @rule(pick=PICK, settles=SETTLES)
    def load(self, pick, settles):
        """P has blocks for what was found."""
        waiting = [name for name, found in self.world.p.found.items() if found and name not in self.world.p.orders]
        if waiting and self.can(self.world.p):
            request = waiting[pick % len(waiting)]
            self.world.p.load(request, self.world.p.found[request], now=self.world.now)
            self.settle(settles)

    @rule(seconds=st.sampled_from([0.5, 1.0, LEASE / 3, LEASE]))
    def wait(self, seconds):
        self.world.run(seconds=seconds, step=2.0)

    @rule()
    def round(self):
        self.world.round()

    @precondition(lambda self: self.troubles < MOST_TROUBLES)
    @rule(what=st.sampled_from(["freeze", "cut", "reset"]), who=st.sampled_from("pd"))
    def trouble(self, what, who):
        self.troubles += 1
        engine = getattr(self.world, who)
        if what == "freeze":
            engine.frozen = True
        elif what == "cut":
            self.world.network.cut(engine.link, is_cut=True)
        else:
            self.world.network.lose()

    @precondition(lambda self: self.troubles)
    @rule()
    def heal(self):
        self.troubles = 0
        for engine in self.world.engines:
            engine.frozen = False
            self.world.network.cut(engine.link, is_cut=False)

    @precondition(lambda self: self.serial > 3)
    @rule()
    def restart_d(self):
        self.serial += 1
        self.world.d.die()
        self.world.d = self.world.start(f"d{self.serial}", 5700)
        self.meet()

    @rule()
    def meet(self):
        if self.can(self.world.d):
            self.world.d.peers.ensure_connected(EngineId("p0"), self.world.p.address, now=self.world.now)

    @invariant()
    def every_block_has_one_owner(self):
        for engine in (self.world.p, self.world.d):
            owned = [engine.free, *engine.owned()]
            assert sorted(block for blocks in owned for block in blocks) == list(range(1, BLOCKS + 1))

    @invariant()
    def what_was_read_is_the_prompts(self):
        """Of every load that succeeded; the request then has its answer, and its blocks are somebody else's."""
        for request, result in list(self.world.p.results.items()):
            if result.failure or request not in self.world.p.into:
                continue
            into = self.world.p.into[request]
            assert self.world.p.bytes_of(into) == self.asked[request][: len(into)], "wrong bytes were called right"
            self.right += 1
            self.world.p.finish(request)

    def teardown(self):
        """Everything heals; then nothing may be left over."""
        if not hasattr(self, "world"):
            return
        self.heal()
        self.world.run()
        for _ in range(2):  # a question may come after the first look, and D's engine thread would be woken for it
            self.world.d.end_step()
            self.world.d.look_up(now=self.world.now)
            self.world.run(seconds=3 * LEASE, step=2.0)
        self.what_was_read_is_the_prompts()
        for request in list(self.asked):
            self.end(request)
        self.world.run(seconds=3 * LEASE, step=2.0)
        for engine in (self.world.p, self.world.d):
            assert (engine.pinned, engine.held, len(engine.leases)) == ({}, {}, 0), f"{engine.name} still lends"
            assert (len(engine.finder), len(engine.lender), len(engine.reader)) == (0, 0, 0)
            assert len(engine.control.lease_renewer) == 0
        assert len(self.world.p.free) == BLOCKS

    def end(self, request):
        """A request is over before its load has begun; one that loads ends with its load."""
        name = RequestId(request)
        self.world.p.finder.cancel(name)
        found = self.world.p.found.get(name)
        if found is not None and name not in self.world.p.orders:
            self.world.p.control.lease_renewer.release(name, found.remote_engine_id)
            self.world.p.found[name] = None

    def settle(self, settles):
        if settles:
            self.world.run()

    def can(self, engine):
        return engine.alive and not engine.frozen

    def pick(self, number):
        names = list(self.asked)
        return names[number % len(names)]
