"""Rules by which engines may turn, die and be replaced, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

As in ``support.pull_mutants``; ``shell/test_turning_engines.py`` shows that each of these is noticed.
"""

import warnings

from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from support.pull_mutants import accept_unfenced_reads, never_expire, read_from_whoever_answers, release_twice
from support.push_mutants import free_without_waiting_for_stopped

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.decode_requests import DecodeRequests
    from pdrelay_connector.shell.prefill_requests import PrefillRequests

__all__ = (
    "accept_unfenced_reads",
    "count_no_pushed_lease",
    "forget_to_stop_renewing",
    "free_what_is_lent",
    "free_what_is_quarantined",
    "free_without_waiting_for_stopped",
    "never_expire",
    "read_from_whoever_answers",
    "release_twice",
)


def free_what_is_lent(patch):
    """Lend the blocks of a prefill without a pin: they are somebody else's next."""

    def hold(self, name, blocks, priority):
        pinned = self._pool

        class Unpinned:
            num_gpu_blocks = pinned().num_gpu_blocks

            def touch(self, blocks):
                pass

        self._pool = Unpinned
        held = whole(self, name, blocks, priority)
        self._pool = pinned
        return held

    whole = PrefillRequests.hold
    patch.setattr(PrefillRequests, "hold", hold)


def count_no_pushed_lease(patch):
    """Show an engine as empty that still pushes."""

    def gauges(self):
        pulled = [name for name in self._held_blocks._leases if name not in self._push_progress]
        return {"leases_held": float(len(pulled)), "blocks_held": float(self._held_blocks.blocks)}

    patch.setattr(PrefillRequests, "gauges", property(gauges))


def free_what_is_quarantined(patch):
    """Use the blocks of a failed load while bytes may still arrive."""
    patch.setattr(DecodeRequests, "update_quarantine", lambda self, news: None)


def forget_to_stop_renewing(patch):
    patch.setattr(LeaseRenewer, "stop_renewing", lambda self, request, engine: None)
