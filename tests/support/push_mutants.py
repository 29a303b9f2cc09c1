"""Rules of push, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

As in ``support.pull_mutants``; ``push/test_push_pair.py`` shows that each of these is noticed.
"""

from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import PushStopped, StartPush
from pdrelay_connector.core.push import decode_scheduler as push_receiver
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.part_writer import PartWriter
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.core.session.peers import Peer


def complete_before_the_source_is(patch):
    accept = PushWriter._accept

    def hasty(self, piece, now):
        accept(self, piece, now)
        source = self._sources[piece.request]
        for writing in list(self._by_request.get(piece.request, ())):
            source.complete = source.complete or source.tokens >= writing.order.groups[0].stop

    patch.setattr(PushWriter, "_accept", hasty)


def do_not_wait_for_the_old_attempts_flights(patch):
    pump = PushWriter._write_computed

    def hasty(self, writing, now):
        source = self._sources.get(writing.order.request)
        if source is not None and writing.attempt != source.attempt:
            writing.attempt, writing.posted = source.attempt, 0
        pump(self, writing, now)

    patch.setattr(PushWriter, "_write_computed", hasty)


def free_without_waiting_for_stopped(patch):
    give_up = PushReceiver._abort

    def hasty(self, *args):
        give_up(self, *args)
        self._results = [
            each._replace(quarantined=False) if isinstance(each, LoadResult) else each for each in self._results
        ]

    patch.setattr(PushReceiver, "_abort", hasty)


def no_quarantine(patch):
    patch.setattr(push_receiver, "QUARANTINE", (0.0, 1))
    patch.setattr(push_receiver, "LONG_QUARANTINE", (0.0, 1))


def believe_that_nothing_is_sent_again(patch):
    patch.setattr(push_receiver, "QUARANTINE", push_receiver.LOCAL_QUARANTINE)


def take_silence_for_death(patch):
    patch.setattr(push_receiver, "LONG_QUARANTINE", push_receiver.QUARANTINE)


def count_time_instead_of_looks(patch):
    lose, until = PushReceiver._on_peer_lost, {}

    def note(self, landing, peer, now):
        lose(self, landing, peer, now)
        until[landing.order.request] = now + landing.check_interval * landing.checks

    def look(self, landing, now):
        if now >= until[landing.order.request]:
            self._release(landing)
        else:
            self._deadlines.set(landing.order.request, now + landing.check_interval)

    patch.setattr(PushReceiver, "_on_peer_lost", note)
    patch.setattr(PushReceiver, "_check_quarantine", look)


def land_without_asking_for_the_lease(patch):
    patch.setattr(LeaseManager, "holds", lambda self, request: True)


def forget_what_is_over(patch):
    patch.setattr(PushCoordinator, "released", lambda self, ended, *, now: None)


def ignore_one_rank(patch):
    register = PushCoordinator._register

    def forgetful(self, conn, order, now):
        register(self, conn, order, now)
        for push in self._by_request.get(order.request, {}).values():
            push.writing_ranks.discard(1)

    patch.setattr(PushCoordinator, "_register", forgetful)


def answer_stop_before_the_workers_have(patch):
    stop = PushCoordinator._stop_for

    def hasty(self, conn, readers):
        stop(self, conn, readers)
        for reader in readers:
            self._link.send(conn, PushStopped(reader, ""))

    patch.setattr(PushCoordinator, "_stop_for", hasty)


def write_whatever_prompt(patch):
    objection = PushWriter._objection

    def trusting(self, writing, source):
        source.prompt = writing.order.prompt
        return objection(self, writing, source)

    patch.setattr(PushWriter, "_objection", trusting)


def forget_who_spoke_early(patch):
    patch.setattr(PushCoordinator, "_note_interest", lambda self, requests, conn, now, *, wants=True: [])


def forget_what_workers_still_write(patch):
    lost = PushCoordinator._lost

    def forgetful(self, conn, now):
        lost(self, conn, now)
        self._draining.clear()

    patch.setattr(PushCoordinator, "_lost", forgetful)


def trust_a_silent_peer(patch):
    patch.setattr(PushReceiver, "_abort_all_of", lambda self, peer: None)


def keep_writing_to_who_left(patch):
    told = PushWriter._on_message
    patch.setattr(
        PushWriter, "_on_message", lambda self, message, now: told(self, message, now) if hasattr(message, "reader") or
        isinstance(message, StartPush) or not hasattr(message, "peer") or hasattr(message, "rank") else None,
    )  # fmt: skip


def write_to_one_rank_only(patch):
    """Take the first rank of a decode engine for the whole."""
    send = PartWriter.write
    patch.setattr(
        PartWriter,
        "write",
        lambda self, remote_ranks, token_ranges, **more: send(self, remote_ranks[:1], token_ranges, **more),
    )


def revoke_what_is_written(patch):
    patch.setattr(PushCoordinator, "is_writing", lambda self, request: False)


def say_nothing_of_what_is_over(patch):
    patch.setattr(LeaseManager, "send_leases_lost", lambda self, conn, lost: None)


def let_anybody_have_a_transfer(patch):
    patch.setattr(PushCoordinator, "_is_foreign", lambda self, request, conn: False)


def register_over_any_connection(patch):
    patch.setattr(Peer, "is_idle", lambda self, *, now: False)


def wait_for_an_answer_that_was_given(patch):
    patch.setattr(PushReceiver, "_on_heartbeat_reply", lambda self, conn: None)
