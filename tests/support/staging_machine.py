"""Staging under everything that can happen to it, in any order.

Decode engines ask, read, stall and vanish; leases end at any moment; connections break, those of P's own workers, too;
copies take as long as they like.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_connector.core.lease.prefill_scheduler import RevocableLease
from pdrelay_connector.core.messages import MAX_RANKS, DropLeases, ReadDone, RenewLeases
from pdrelay_connector.core.staging.staged_read import PartState
from support.staging_world import BLOCKS, LEASE, PATIENCE, SLOTS, StagingWorld

PICK = st.integers(0, 1000)


class StagingMachine(RuleBasedStateMachine):
    """One prefill engine, one or two decode engines."""

    @initialize(
        ranks=st.integers(1, 2),
        groups=st.integers(1, 2),
        decoders=st.lists(st.sampled_from([2, 1]), min_size=1, max_size=2),
        turns=st.integers(0, 2),
        size=st.integers(1, SLOTS),
    )
    def start(self, ranks, groups, decoders, turns, size):
        self.world = StagingWorld(ranks=ranks, groups=groups, decoders=decoders)
        self.requests = []
        for rank, copier in enumerate(self.world.p.copiers):
            copier.turns = copier._left = turns
            copier.before_copy = lambda number, rank=rank: self.check_copy(rank, number)
        for number in range(3):
            self.prefill(blocks=4, size=size, decoder=number, loads=True)
        self.world.run()

    # ---- what clients do

    @rule(blocks=st.integers(1, 5), size=st.integers(1, 4), decoder=st.integers(0, 1), loads=st.booleans())
    def prefill(self, blocks, size, decoder, loads):
        if (request := self.world.p.lend(blocks)) is not None:
            self.requests.append(request)
            if loads:
                self.start_load(request, size, decoder, None)

    @precondition(lambda self: self.requests)
    @rule(
        pick=PICK, size=st.integers(1, SLOTS + 1), decoder=st.integers(0, 1), only=st.sampled_from([None, None, (0,)])
    )
    def load(self, pick, size, decoder, only):
        """Perhaps again, perhaps after its lease; perhaps only by one rank; perhaps in parts that do not fit."""
        request = self.requests[pick % len(self.requests)]
        if request in self.world.p.held:
            self.start_load(request, size, decoder, only)

    def start_load(self, request, size, decoder, only):
        decoder %= len(self.world.decoders)
        if all(worker.conn is not None for worker in self.world.decoders[decoder].workers):
            self.world.load(request, size=size, decoder=decoder, ranks=only)

    @precondition(lambda self: self.world.read_started())
    @rule(pick=PICK)
    def go_on(self, pick):
        """One rank has read its part."""
        reading = self.world.read_started()
        worker, load = reading[pick % len(reading)]
        worker.go_on(load)

    @precondition(lambda self: self.world.read_started())
    @rule()
    def all_go_on(self):
        self.world.go_on()

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, decoder=PICK, kind=st.sampled_from([RenewLeases, RenewLeases, DropLeases]))
    def say(self, pick, decoder, kind):
        decoder = self.world.decoders[decoder % len(self.world.decoders)]
        if decoder.conn is not None:
            decoder.say(kind, self.requests[pick % len(self.requests)])

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def revoke(self, pick):
        """P lacks blocks; what somebody reads it keeps."""
        p = self.world.p
        request = self.requests[pick % len(self.requests)]
        if request in p.leases:
            is_read = p.staging_coordinator.is_reading(request) or p.leases.is_read(request, now=self.world.now)
            p.lease_manager.revoke(
                [RevocableLease(request, 1)], 1, now=self.world.now, is_busy=p.staging_coordinator.is_reading
            )
            assert (request in p.leases) == is_read

    @precondition(lambda self: self.world.read_started())
    @rule(pick=PICK, decoder=PICK)
    def meddle(self, pick, decoder):
        """Somebody says over his own connection that another's rank has read everything."""
        reading = self.world.read_started()
        decoder = self.world.decoders[decoder % len(self.world.decoders)]
        worker, load = reading[pick % len(reading)]
        if decoder.conn is not None:
            decoder.link.send(decoder.conn, ReadDone(load.request, load.reader, worker.rank, MAX_RANKS))

    # ---- time

    @rule()
    def round(self):
        self.world.round()

    @rule()
    def talk(self):
        self.world.run()

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE, PATIENCE]))
    def wait(self, seconds):
        self.world.run(seconds, step=5.0)

    @rule(seconds=st.sampled_from([LEASE / 2, LEASE]))
    def stall(self, seconds):
        """Time passes and nobody has a turn."""
        self.world.now += seconds

    # ---- what goes wrong

    @rule(
        what=st.sampled_from(
            ["stick", "unstick", "fail", "mend", "reconnect", "hang up", "scheduler leaves", "network"]
        ),
        rank=st.integers(0, 1),
        decoder=PICK,
    )
    def trouble(self, what, rank, decoder):
        """Of a device, of a worker here or there, of a decode engine's scheduler, or of everybody."""
        p = self.world.p
        decoder = self.world.decoders[decoder % len(self.world.decoders)]
        copier = p.copiers[rank % p.ranks]
        match what:
            case "stick" | "unstick":
                copier.stuck = what == "stick"
            case "fail" | "mend":
                copier.failure = "a device error" if what == "fail" else ""
            case "reconnect":
                p.lose_worker(rank % p.ranks)
            case "hang up":
                decoder.workers[rank % decoder.ranks].hang_up()
            case "scheduler leaves" if decoder.conn is not None:
                decoder.link.close(decoder.conn)
                decoder.conn = None
            case "network":
                self.world.network.lose()

    @rule(decoder=PICK, how=st.sampled_from(["cut", "mend", "notice"]))
    def cut(self, decoder, how):
        """A decode engine is cut off; in the end TCP notices."""
        decoder = self.world.decoders[decoder % len(self.world.decoders)]
        if how == "notice":
            self.world.network.time_out()
            return
        for link in (decoder.link, *(worker.link for worker in decoder.workers)):
            self.world.network.cut(link, is_cut=how == "cut")

    # ---- what must hold

    def check_copy(self, rank, number):
        """Bytes move only into slots that are kept for that very copy."""
        stager = self.world.p.stagers[rank]
        staging_coordinator = self.world.p.staging_coordinator
        order = stager._running[number]
        part = staging_coordinator._parts.get(order.number)
        assert part is not None, "slots were free while a copy into them was under way"
        assert part.state in (PartState.COPYING, PartState.ENDING), "a part that may be read was written to"
        assert order.slots == part.slots

    @invariant()
    def no_slot_is_in_two_parts(self):
        if not hasattr(self, "world"):
            return
        parts = self.world.p.staging_coordinator._parts.values()
        for group in range(self.world.p.groups):
            slots = [slot for part in parts if part.slots for slot in part.slots[group]]
            assert len(slots) == len(set(slots))
            assert all(0 < slot <= SLOTS for slot in slots)

    @invariant()
    def what_may_be_read_is_kept(self):
        """While its lease is held, the fence will call what a rank reads right."""
        if not hasattr(self, "world"):
            return
        staging_coordinator = self.world.p.staging_coordinator
        assert {key.request for key in staging_coordinator._reads} <= self.world.p.held.keys()
        for worker, load in self.world.read_started():
            if load.request in self.world.p.leases and (load.request, load.reader) in staging_coordinator._reads:
                part = staging_coordinator._reads[load.request, load.reader].parts.get(load.part)
                assert part is not None, "slots were taken from a rank that reads"
                assert (part.state, part.slots) == (PartState.STAGED, load.slots)
                assert worker.rank in part.ranks

    @invariant()
    def slots_are_kept_while_a_copy_into_them_runs(self):
        if not hasattr(self, "world"):
            return
        for stager in self.world.p.stagers:
            for order in stager._running.values():
                assert order.number in self.world.p.slots._granted

    def teardown(self):
        """Everything heals; then everybody has an answer, and nothing is left over."""
        if not hasattr(self, "world"):
            return
        world, p = self.world, self.world.p
        for link in world.network.links:
            world.network.cut(link, is_cut=False)
        for copier in p.copiers:
            copier.stuck, copier.failure = False, ""
        for _ in range(8):
            world.go_on()
        world.run(LEASE + PATIENCE + 1, step=5.0)
        world.run(LEASE + PATIENCE + 1, step=5.0)
        workers = [worker for decoder in world.decoders for worker in decoder.workers]
        assert [worker.unanswered() for worker in workers] == [[] for _ in workers], "somebody waits for an answer"
        assert p.held == {}
        assert sorted(p.free) == list(range(1, BLOCKS))
        assert len(p.staging_coordinator) == len(p.slots) == p.slots.granted == 0
        assert [len(stager) + len(copier) for stager, copier in zip(p.stagers, p.copiers, strict=True)] == [0] * p.ranks
