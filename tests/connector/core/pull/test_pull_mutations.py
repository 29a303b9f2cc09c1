"""The tests above have teeth: each rule that is broken here on purpose must make one of them fail.

A property that nothing can violate proves nothing. Every mutant is one rule of the design turned off.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.engines import BLOCKS, LEASE, LOOP_TIMEOUT, TIMEOUT, World, right
from support.pair_machine import PairMachine
from xpyd_connector.core.lease.decode_scheduler import LeaseRenewer
from xpyd_connector.core.lease.kv_params import PullParams
from xpyd_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager
from xpyd_connector.core.ports import ConnectionLost
from xpyd_connector.core.pull.decode_worker import PullReader
from xpyd_connector.core.results import LoadResult
from xpyd_connector.core.session.peers import PeerState, PeerTable
from xpyd_connector.core.transfer.remote_memory import RemoteEngine
from xpyd_connector.core.transfer.transfers import Transfers
from xpyd_connector.errors import IllegalTransition

SEARCH = settings(
    max_examples=200, stateful_step_count=40, deadline=None, database=None, derandomize=True,
    phases=(Phase.generate,), report_multiple_bugs=False,
)  # fmt: skip


def any_order_of_events():
    run_state_machine_as_test(PairMachine, settings=SEARCH)


def a_queued_request_keeps_its_lease():
    world = World()
    offer = world.lend()
    world.start_renewing(offer)
    world.run(seconds=5 * LEASE)
    world.load(offer)
    world.run()
    assert world.d.result("d-a").failure == ""


def an_early_renewal_does_not_cost_time():
    world = World()
    world.start_renewing(world.lend())
    world.run()
    world.network.cut(world.d.link, is_cut=True)
    world.run(seconds=LEASE - 1)
    assert world.p.freed == []


def a_crash_is_noticed_at_once():
    world = World()
    world.start_renewing(world.lend())
    world.run()
    world.d.die()
    world.run()
    assert [released.why for released in world.p.freed] == [LeaseEvent.PEER_LOST]


def the_slower_rank_keeps_its_blocks():
    world = World(p={"ranks": 2}, d={"ranks": 2})
    world.load(world.lend())
    world.run()
    assert world.p.freed == []


def blocks_wait_until_nixl_has_let_go():
    world = World()
    world.d.mover.stuck = world.d.mover.clinging = True
    into = world.load(world.lend())
    world.run(seconds=TIMEOUT)
    assert world.d.result("d-a").failure
    assert not set(into) & set(world.d.free)


def a_load_that_is_given_up_is_not_started_again():
    world = World()
    world.d.mover.stuck = world.d.mover.clinging = True
    world.load(world.lend())
    world.run(seconds=TIMEOUT)
    world.load(world.lend("b"), "b")
    world.run()


def a_load_is_read_from_every_rank():
    world = World(p={"ranks": 2, "heads": 2}, d={"heads": 2})
    into = world.load(world.lend())
    world.run()
    assert world.bytes_of(into) == [right("p-a", number, head) for number in range(3) for head in range(2)]


def a_load_waits_for_every_rank():
    world = World(p={"ranks": 2, "heads": 2}, d={"heads": 2})
    world.network.cut(world.p.other_links[0], is_cut=True)
    world.load(world.lend())
    world.run()
    assert world.d.result("d-a") is None


def a_lease_that_is_revoked_while_it_is_read_is_noticed():
    """D's word that it reads is lost: P gives the blocks to another, and what D has read must not become an answer."""
    world = World()
    offer = world.lend()
    world.start_renewing(offer)
    world.run()
    world.d.mover.stuck = True
    into = world.load(offer)
    world.d.control.lease_renewer._pending.clear()
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()
    world.d.mover.stuck = False
    world.run()
    assert world.bytes_of(into) == [b"reused"] * 3
    assert "lease" in world.d.result("d-a").failure


def what_is_read_is_not_revoked():
    world = World()
    offer = world.lend()
    world.start_renewing(offer)
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()
    world.d.mover.stuck = False
    world.run()
    assert world.d.result("d-a").failure == ""


def what_waits_for_host_memory_is_not_revoked():
    world = World()
    offer = world.lend()
    world.start_renewing(offer)
    world.d.control.lease_renewer.read_started("d-a", offer.remote_engine_id)
    world.run(seconds=3 * TIMEOUT)
    world.p.revoke("p-a", now=world.now)
    world.run()
    assert world.p.freed == []


def what_is_not_said_to_be_read_any_more_is_revoked_in_the_end():
    """D has vanished in the middle of a read; its lease would last longer."""
    world = World(p={"timeout": TIMEOUT / 2})
    offer = world.lend()
    world.start_renewing(offer)
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    world.d.frozen = True
    world.run(seconds=TIMEOUT / 2)
    world.p.revoke("p-a", now=world.now)
    world.run()
    assert [released.why for released in world.p.freed] == [LeaseEvent.REVOKED]


def a_revoked_lease_is_told_at_once():
    world = World()
    lost = []
    world.d.on_lost = lost.append
    world.start_renewing(world.lend())
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()
    assert lost == ["d-a"]
    assert len(world.d.control.lease_renewer) == 0
    assert len(world.p.free) == BLOCKS


def another_engine_cannot_keep_blocks():
    world = World()
    world.start_renewing(world.lend())
    world.run()
    world.d.frozen = True
    other = world.start("d1", 5701)
    other.control.lease_renewer.start_renewing(
        "d-x", PullParams("p0", "p-a", *world.p.address, ((1,),), 4), now=world.now
    )
    world.run(seconds=2 * LEASE)
    assert [released.why for released in world.p.freed] == [LeaseEvent.EXPIRED]


def another_engine_cannot_end_a_lease():
    world = World(d={"timeout": 1000.0})
    offer = world.lend()
    world.start_renewing(offer)
    world.run()
    other = world.start("d1", 5701)
    other.load("d-x", offer, now=world.now)
    world.run()
    assert "lease" in other.result("d-x").failure
    assert world.p.freed == []
    assert world.p.counters.take().counters["foreign_messages"] == 1


def an_engine_that_hangs_renews_nothing():
    world = World()
    world.start_renewing(world.lend())
    world.run()
    world.d.turned_at = world.now
    world.run(seconds=LOOP_TIMEOUT - LEASE)
    assert world.p.freed == []
    world.run(seconds=2 * LEASE)
    assert [released.why for released in world.p.freed] == [LeaseEvent.EXPIRED]
    assert world.d.counters.take().counters["renewals_withheld"] > 0


def drop_the_heartbeat(patch):
    patch.setattr(LeaseRenewer, "_send_heartbeat", lambda self, engine, wanted, now: None)


def shorten_on_renew(patch):
    def renew(self, request, holder, *, now):
        if held := whole(self, request, holder, now=now):
            self._leases[request].expires_at = now + self._extension
            self._deadlines.set(request, now + self._extension)
        return held

    whole = LeaseTable.renew
    patch.setattr(LeaseTable, "renew", renew)


def accept_unfenced_reads(patch):
    whole = PullReader._on_fence_result
    patch.setattr(
        PullReader, "_on_fence_result", lambda self, conn, request, *, held: whole(self, conn, request, held=True)
    )


def answer_the_fence_from_memory(patch):
    """P says that it still holds what it once held."""
    grant, known = LeaseTable.grant, set()

    def remember(self, request, *, now):
        known.add(request)
        grant(self, request, now=now)

    patch.setattr(LeaseTable, "grant", remember)
    patch.setattr(LeaseTable, "__contains__", lambda self, request: request in known)
    patch.setattr(LeaseTable, "done", lambda self, request, *_: self._leases.get(request) and self.drop(request))


def ignore_one_rank(patch):
    whole = LeaseTable.done
    patch.setattr(LeaseTable, "done", lambda self, request, reader, rank, ranks: whole(self, request, reader, rank, 1))


def forget_peer_lost(patch):
    whole = LeaseManager.on
    patch.setattr(
        LeaseManager, "on", lambda self, event, *, now: isinstance(event, ConnectionLost) or whole(self, event, now=now)
    )


def never_expire(patch):
    patch.setattr(LeaseTable, "expire", lambda self, *, now: [])


def release_twice(patch):
    whole = LeaseManager.take_released
    patch.setattr(LeaseManager, "take_released", lambda self: whole(self) * 2)


def trust_nixl_to_have_let_go(patch):
    """Let others use the blocks of a load that is given up at once, while bytes may still land."""
    whole = PullReader._abort_once

    def give_up(self, load, counter, why):
        whole(self, load, counter, why)
        self._results = [
            result._replace(quarantined=False) for result in self._results if isinstance(result, LoadResult)
        ]

    patch.setattr(PullReader, "_abort_once", give_up)


def start_again_what_is_given_up(patch):
    patch.setattr(PullReader, "_on_peer_changed", _peer_changed_without_states)


def _peer_changed_without_states(self, peer, now):
    loads = [load for load in self._loads.values() if peer is not None and load.order.engine == peer.engine]
    if loads and peer.state is PeerState.CONNECTED:
        self._attach(peer, now)
    for load in loads:
        if peer.state is PeerState.CONNECTED:
            self._begin(load, now)
        elif peer.state is PeerState.REFUSED:
            self._fail(load, "loads_failed_handshake", peer.reason)
        else:
            self._abort(load, "loads_failed_peer", peer.reason)
    if peer is not None and peer.state is PeerState.GONE:
        self._reach.detach(peer.engine)


def read_from_whoever_answers(patch):
    """Take a restarted engine for the one before it."""
    patch.setattr(PeerTable, "_objection", lambda self, peer, welcome: None)


def keep_what_nobody_wants(patch):
    patch.setattr(LeaseRenewer, "stop_renewing", lambda self, request, engine: None)


def read_from_one_rank_only(patch):
    """Take the first rank of an engine for the whole."""
    whole = RemoteEngine.spans
    patch.setattr(RemoteEngine, "spans", lambda self, token_ranges: whole(self, token_ranges)[:1])


def call_a_load_read_when_its_first_read_is(patch):
    """Forget that several ranks are read."""

    def ended(self, step, now):
        with pytest.MonkeyPatch.context() as hasty:
            hasty.setattr(Transfers, "is_active", lambda self, owner: False)
            whole(self, step, now)

    whole = PullReader._on_step_ended
    patch.setattr(PullReader, "_on_step_ended", ended)


def revoke_without_a_word_to_the_fence(patch):
    """P gives the blocks away, and keeps the lease."""

    def revoke(self, request):
        self._leases[request].expires_at = float("inf")
        return LeaseEnded(request, LeaseEvent.REVOKED)

    patch.setattr(LeaseTable, "revoke", revoke)


def revoke_what_is_read(patch):
    patch.setattr(LeaseTable, "is_read", lambda self, request, *, now: False)


def protect_what_is_read_for_ever(patch):
    patch.setattr(LeaseTable, "is_read", lambda self, request, *, now: self._leases[request].read_until > 0)


def say_once_what_is_read(patch):
    patch.setattr(LeaseRenewer, "read_started", _reading_without_memory)


def _reading_without_memory(self, request, engine):
    wanted = self._leases_by_engine[engine]
    wanted.to_read[wanted.params[request].remote_request_id] = None
    self._pending[engine] = None


def keep_a_revocation_to_yourself(patch):
    patch.setattr(LeaseManager, "send_leases_lost", lambda self, conn, lost: None)


def only_count_what_lapsed(patch):
    patch.setattr(LeaseRenewer, "_on_leases_lost", lambda self, conn, requests: None)


def let_anybody_renew(patch):
    patch.setattr(LeaseTable, "is_same", lambda self, holder, conn: True)


def let_anybody_end(patch):
    patch.setattr(LeaseTable, "may_end", lambda self, request, conn: True)


def renew_for_ever(patch):
    whole = LeaseRenewer.__init__

    def init(self, *args, **kwargs):
        whole(self, *args, **{**kwargs, "loop_timeout": float("inf")})

    patch.setattr(LeaseRenewer, "__init__", init)


MUTANTS = [
    (revoke_without_a_word_to_the_fence, a_lease_that_is_revoked_while_it_is_read_is_noticed),
    (revoke_without_a_word_to_the_fence, any_order_of_events),
    (revoke_what_is_read, what_is_read_is_not_revoked),
    (protect_what_is_read_for_ever, what_is_not_said_to_be_read_any_more_is_revoked_in_the_end),
    (say_once_what_is_read, what_waits_for_host_memory_is_not_revoked),
    (keep_a_revocation_to_yourself, a_revoked_lease_is_told_at_once),
    (only_count_what_lapsed, a_revoked_lease_is_told_at_once),
    (let_anybody_renew, another_engine_cannot_keep_blocks),
    (let_anybody_end, another_engine_cannot_end_a_lease),
    (renew_for_ever, an_engine_that_hangs_renews_nothing),
    (drop_the_heartbeat, a_queued_request_keeps_its_lease),
    (shorten_on_renew, an_early_renewal_does_not_cost_time),
    (ignore_one_rank, the_slower_rank_keeps_its_blocks),
    (forget_peer_lost, a_crash_is_noticed_at_once),
    (accept_unfenced_reads, any_order_of_events),
    (answer_the_fence_from_memory, any_order_of_events),
    (never_expire, any_order_of_events),
    (release_twice, any_order_of_events),
    (trust_nixl_to_have_let_go, blocks_wait_until_nixl_has_let_go),
    (start_again_what_is_given_up, a_load_that_is_given_up_is_not_started_again),
    (read_from_whoever_answers, any_order_of_events),
    (keep_what_nobody_wants, any_order_of_events),
    (read_from_one_rank_only, a_load_is_read_from_every_rank),
    (call_a_load_read_when_its_first_read_is, a_load_waits_for_every_rank),
]
SCENARIOS = list(dict.fromkeys(scenario for _, scenario in MUTANTS if scenario is not any_order_of_events))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenarios_hold_as_long_as_no_rule_is_broken(scenario):
    """Otherwise their failures below would mean nothing; ``test_pair_properties.py`` shows it for the machine."""
    scenario()


@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS, ids=lambda part: part.__name__)
def test_a_broken_rule_is_noticed(monkeypatch, mutate, scenario):
    """The name of the mutant says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises((AssertionError, IllegalTransition, KeyError)):
        scenario()
