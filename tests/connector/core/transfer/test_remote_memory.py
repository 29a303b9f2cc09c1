"""Which ranks of another engine are attached: all that are needed, or none."""

import numpy as np
import pytest

from support.engines import BLOCK_SIZE, changed
from support.recording_agent import RecordingAgent
from xpyd_connector.core.ids import EngineId
from xpyd_connector.core.layout.transfer_plan import TokenRange
from xpyd_connector.core.messages import RankInfo, Region
from xpyd_connector.core.transfer.remote_memory import RemoteEngines
from xpyd_connector.errors import IncompatiblePeer, ProtocolViolation, TransferError

P = EngineId("p0")
HEADS, WIDTH = 4, 16
WHOLE = TokenRange(0, 0, BLOCK_SIZE, [1], [2])


def rank_of(rank, ranks, name="p", all_heads=HEADS):
    heads = max(all_heads // ranks, 1)
    row = heads * BLOCK_SIZE * WIDTH
    region = Region(0, 13, heads, BLOCK_SIZE, WIDTH, row, BLOCK_SIZE * WIDTH, WIDTH, all_heads=all_heads)
    return RankInfo(rank, ranks, f"{name}/{rank}".encode(), "DRAM", 0, (region,))


def engine(ranks, **options):
    return [rank_of(rank, ranks, **options) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("rank", "ranks", "there", "all_heads", "needed"),
    [
        (0, 1, 4, 4, ["p/0", "p/1", "p/2", "p/3"]),
        (1, 2, 4, 4, ["p/2", "p/3"]),
        (1, 2, 1, 4, ["p/0"]),
        (3, 4, 2, 4, ["p/1"]),
        (0, 1, 4, 2, ["p/0", "p/2"]),  # heads that several ranks keep are taken from one of them
        (1, 2, 2, 1, ["p/1"]),
    ],
)
def test_those_ranks_are_attached_that_keep_what_is_needed(rank, ranks, there, all_heads, needed):
    """And no other: each costs memory and a connection."""
    mover = RecordingAgent()
    reach = RemoteEngines(mover, rank_of(rank, ranks, "d", all_heads))
    reach.attach(P, engine(there, all_heads=all_heads))

    assert mover.attached == [remote_rank.handle for remote_rank in reach[P].remote_ranks] == needed
    assert list(reach) == [P]


def test_what_is_read_from_the_ranks_is_the_whole_together():
    """Each head of each token once."""
    reach = RemoteEngines(RecordingAgent(), rank_of(0, 1, "d"))
    reach.attach(P, engine(4))
    found = reach[P].spans([WHOLE])
    runs = np.concatenate([spans for _, spans in found])
    into = sorted((here, size) for _, here, size in runs.tolist())

    assert [handle for handle, _ in found] == ["p/0", "p/1", "p/2", "p/3"]
    block = HEADS * BLOCK_SIZE * WIDTH
    assert into == [(2 * block + head * block // HEADS, block // HEADS) for head in range(HEADS)]


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
        (engine(4)[:3], "engine p0 says nothing of its rank 3, whose heads are needed here"),
        ([*engine(4)[:3], changed(rank_of(3, 4), regions=())], "0 regions, ours has 1"),
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


def test_blocks_that_the_other_engine_does_not_have_are_a_violation():
    """Said for one load; the engine stays reached."""
    reach = RemoteEngines(RecordingAgent(), rank_of(0, 1, "d"))
    reach.attach(P, engine(1))
    with pytest.raises(ProtocolViolation, match="block 13"):
        reach[P].spans([WHOLE._replace(remote=[13])])

    assert list(reach) == [P]
