"""Rules of pull, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

A property that nothing can violate proves nothing; ``pull/test_pull_pair.py`` shows that each of these is noticed.
"""

import pytest

from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.ports import ConnectionLost
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.core.session.peers import PeerState, PeerTable
from pdrelay_connector.core.transfer.remote_memory import RemoteEngine
from pdrelay_connector.core.transfer.transfers import Transfers


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
        PullReader,
        "_on_fence_result",
        lambda self, conn, request, sums, now, *, held: whole(self, conn, request, sums, now, held=True),
    )


def answer_the_fence_from_memory(patch):
    """P says that it still holds what it once held."""
    grant, known = LeaseTable.grant, set()

    def remember(self, request, *, now):
        known.add(request)
        grant(self, request, now=now)

    patch.setattr(LeaseTable, "grant", remember)
    patch.setattr(LeaseTable, "__contains__", lambda self, request: request in known)
    patch.setattr(
        LeaseTable,
        "done",
        lambda self, request, *_: self._leases.get(request) and self.end(request, LeaseEvent.DROPPED),
    )


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

    def give_up(self, load, counter, why, now):
        whole(self, load, counter, why, now)
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
            self._fail(load, "loads_failed_handshake", peer.reason, now)
        else:
            self._abort(load, "loads_failed_peer", peer.reason, now)
    if peer is not None and peer.state is PeerState.GONE:
        self._reach.detach(peer.engine)


def read_from_whoever_answers(patch):
    """Take a restarted engine for the one before it."""
    patch.setattr(PeerTable, "_imposture", lambda self, peer, welcome: None)


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

    def end(self, request, why):
        if why is not LeaseEvent.REVOKED:
            return whole(self, request, why)
        self._leases[request].expires_at = float("inf")
        return LeaseEnded(request, why)

    whole = LeaseTable.end
    patch.setattr(LeaseTable, "end", end)


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
