"""Which ranks of another engine are attached: all that are needed, or none."""

import pytest

from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.core.transfer.remote_memory import RemoteEngines
from pdrelay_connector.errors import IncompatiblePeer, TransferError
from support.engines import BLOCK_SIZE, changed
from support.recording_agent import RecordingAgent

P = EngineId("p0")
HEADS, WIDTH = 4, 16


def rank_of(rank, ranks, name="p", all_heads=HEADS):
    heads = max(all_heads // ranks, 1)
    row = heads * BLOCK_SIZE * WIDTH
    region = Region(0, 13, heads, BLOCK_SIZE, WIDTH, row, BLOCK_SIZE * WIDTH, WIDTH, all_heads=all_heads)
    return RankInfo(rank, ranks, f"{name}/{rank}".encode(), "DRAM", 0, (region,))


def engine(ranks, **options):
    return [rank_of(rank, ranks, **options) for rank in range(ranks)]


def test_a_rank_that_has_nothing_of_a_stretch_is_not_asked():
    """An empty read would be an error to NIXL."""
    reach = RemoteEngines(RecordingAgent(), rank_of(0, 1, "d"))
    reach.attach(P, engine(2))

    assert reach[P].spans([TokenRange(0, 4, 4, [], [])]) == []


@pytest.mark.parametrize("broken", range(4))
def test_all_are_attached_or_none(broken):
    """A half-attached engine would be read in part."""
    mover = RecordingAgent({f"p/{broken}": f"NIXL cannot use rank {broken}"}.get)
    reach = RemoteEngines(mover, rank_of(0, 1, "d"))
    with pytest.raises(TransferError, match=f"rank {broken}"):
        reach.attach(P, engine(4))

    assert mover.attached == []
    assert list(reach) == []
    reach.detach(P)


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([], "engine p0 has no ranks"),
        (engine(4)[:3], "it says nothing of the layers on its rank 3, which is needed here"),
        ([*engine(4)[:3], changed(rank_of(3, 4), regions=())], "it says nothing of the layers on its rank 3"),
    ],
)
def test_an_engine_that_says_too_little_is_refused(ranks, sentence):
    """Before any of it is attached."""
    mover = RecordingAgent()
    with pytest.raises(IncompatiblePeer, match=sentence):
        RemoteEngines(mover, rank_of(0, 1, "d")).attach(P, ranks)

    assert mover.attached == []


def test_ranks_that_do_not_agree_on_how_many_they_are_are_refused():
    """Each by itself could be: but together they would leave heads unread, and nobody would notice."""
    mover = RecordingAgent()
    with pytest.raises(IncompatiblePeer, match="ranks of engine p0 say that there are 2 and 4"):
        RemoteEngines(mover, rank_of(0, 1, "d")).attach(P, [rank_of(0, 2), rank_of(1, 4)])

    assert mover.attached == []


def test_a_rank_that_is_not_needed_here_is_checked_too():
    """Otherwise one rank of ours would refuse an engine and another not."""
    wrong = changed(rank_of(3, 4).regions[0], width=8, token_stride=8)
    with pytest.raises(IncompatiblePeer, match="entries of 8 bytes, ours 16"):
        RemoteEngines(RecordingAgent(), rank_of(0, 2, "d")).attach(
            P, [*engine(4)[:3], changed(rank_of(3, 4), regions=(wrong,))]
        )


def test_an_engine_is_detached_with_all_its_ranks_and_once():
    """Whether it was ever reached or not."""
    mover = RecordingAgent()
    reach = RemoteEngines(mover, rank_of(0, 1, "d"))
    reach.attach(P, engine(4))
    reach.detach(P)
    reach.detach(P)
    reach.detach(EngineId("nobody"))

    assert mover.attached == []
    assert list(reach) == []
