"""Rules of pull, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

A property that nothing can violate proves nothing; ``pull/test_pull_pair.py`` shows that each of these is noticed.
"""

from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.session.peers import PeerTable


def accept_unfenced_reads(patch):
    whole = PullReader._on_fence_result
    patch.setattr(
        PullReader,
        "_on_fence_result",
        lambda self, conn, request, sums, now, *, held: whole(self, conn, request, sums, now, held=True),
    )


def answer_the_fence_from_memory(patch):
    """P says that it still holds what it once held."""
    grant = LeaseTable.grant
    known = set()

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


def never_expire(patch):
    patch.setattr(LeaseTable, "expire", lambda self, *, now: [])


def release_twice(patch):
    whole = LeaseManager.take_released
    patch.setattr(LeaseManager, "take_released", lambda self: whole(self) * 2)


def read_from_whoever_answers(patch):
    """Take a restarted engine for the one before it."""
    patch.setattr(PeerTable, "_imposture", lambda self, peer, welcome: None)


def keep_what_nobody_wants(patch):
    patch.setattr(LeaseRenewer, "stop_renewing", lambda self, request, engine: None)


def revoke_without_a_word_to_the_fence(patch):
    """P gives the blocks away, and keeps the lease."""

    def end(self, request, why):
        if why is not LeaseEvent.REVOKED:
            return whole(self, request, why)
        self._leases[request].expires_at = float("inf")
        return LeaseEnded(request, why)

    whole = LeaseTable.end
    patch.setattr(LeaseTable, "end", end)
