"""Rules for engines of unequal stages and shapes, each turned off; ``transfer/test_unequal_pair.py`` notices each."""

from pdrelay_connector.core.layout import parts, transfer_plan
from pdrelay_connector.core.lease import decode_scheduler
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.push import prefill_worker
from pdrelay_connector.core.session.peers import PeerState, PeerTable
from pdrelay_connector.core.transfer import remote_memory


def read_from_one_stage(patch):
    whole = transfer_plan.needed_ranks
    patch.setattr(remote_memory, "needed_ranks", lambda ours, theirs: whole(ours, theirs)[:1])


def take_ranks_for_workers(patch):
    patch.setattr(RankInfo, "worker", property(lambda self: self.rank))
    patch.setattr(RankInfo, "workers", property(lambda self: self.ranks))


def pair_layers_by_their_place(patch):
    shared = lambda ours, theirs: list(zip(ours.regions, theirs.regions, strict=False))  # noqa: E731
    for module in (parts, transfer_plan, prefill_worker):
        patch.setattr(module, "shared_regions", shared)


def write_to_one_stage(patch):
    whole = transfer_plan.provides
    patch.setattr(
        prefill_worker, "provides", lambda source, target: target.stage == 0 and whole(source, target)
    )  # fmt: skip


def compare_no_shapes(patch):
    patch.setattr(PeerTable, "_difference", lambda self, welcome: None)


def keep_leases_of_engines_that_differ(patch):
    patch.setattr(decode_scheduler, "_LISTENS", (PeerState.CONNECTED,))
