"""Rules of checksums, each turned off; ``verify/test_verified_loads.py`` shows that each of these is noticed."""

from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.verify.sampling import Sampling


def confirm_before_the_sums_are_there(patch):
    def grant(self, request, *, now, sampled=False):
        whole(self, request, now=now)

    whole = LeaseManager.grant
    patch.setattr(LeaseManager, "grant", grant)


def wait_for_the_sums_without_a_bound(patch):
    patch.setattr(LeaseManager, "_give_up_sums", lambda self, request, now: None)


def remember_the_sums_for_ever(patch):
    """A lease that is over leaves its checksums behind."""

    def release(self, released):
        kept = dict(self._sampled)
        whole(self, released)
        self._sampled.update(kept)

    whole = LeaseManager._release
    patch.setattr(LeaseManager, "_release", release)


def forget_who_waits_for_the_sums(patch):
    """Who waits is not told that the lease is over."""

    def release(self, released):
        for lease in released:
            self._sampled.pop(lease.request, None)
        whole(self, released)

    whole = LeaseManager._release
    patch.setattr(LeaseManager, "_release", release)


def compare_nothing_after_a_read(patch):
    patch.setattr(PullReader, "_mismatch", lambda self, load, sums: "")


def drop_the_sums_of_a_push(patch):
    whole = PushReceiver._on_push_done
    patch.setattr(
        PushReceiver,
        "_on_push_done",
        lambda self, conn, reader, sums, *, held: whole(self, conn, reader, (), held=held),
    )


def take_no_sums_of_a_push(patch):
    patch.setattr(PushWriter, "_sums", lambda self, job, source: None)


def sample_one_block_only(patch):
    whole = Sampling.choose
    patch.setattr(Sampling, "choose", lambda self, *args, **kwargs: whole(self, *args, **kwargs)[:1])
