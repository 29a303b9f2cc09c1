"""Which blocks are sampled: those that hold something that a decode engine gets, spread over the prompt."""

from hypothesis import given
from hypothesis import strategies as st

from xpyd_connector.core.ids import BlockId, RequestId
from xpyd_connector.core.messages import LentBlocks
from xpyd_connector.core.verify.sampling import SampledBlock, Sampling

NAME = RequestId("a")


def chosen(groups, *, blocks=256, sizes=(4, 4), states=(), tokens=10, wanted=None, name=NAME):
    """Return what a sampling of all prefills chooses."""
    sampling = Sampling(1.0, blocks)
    return sampling.choose(name, groups, sizes=dict(enumerate(sizes)), states=set(states), tokens=tokens, wanted=wanted)


def test_the_share_is_that_of_many_names():
    """And no name is taken at 0, every name at 1."""
    names = [RequestId(f"cmpl-{number}") for number in range(4000)]

    assert sum(map(Sampling(0.25, 1).takes, names)) in range(900, 1100)
    assert not any(map(Sampling(0.0, 1).takes, names))
    assert all(map(Sampling(1.0, 1).takes, names))


def test_the_last_token_is_not_compared():
    """A decode engine computes it itself; a block that holds nothing else is not sampled."""
    assert set(chosen([[5, 6, 7]], tokens=10)) == {
        SampledBlock(0, 5, 0, 4),
        SampledBlock(0, 6, 4, 8),
        SampledBlock(0, 7, 8, 9),
    }
    assert set(chosen([[5, 6, 7]], tokens=9)) == {SampledBlock(0, 5, 0, 4), SampledBlock(0, 6, 4, 8)}


def test_of_a_state_there_is_one_block_that_covers_all_tokens():
    """And the prompt's last token was left out before, for the group beside it, too."""
    assert set(chosen([[5, 6], [9]], states={1}, tokens=8)) == {
        SampledBlock(0, 5, 0, 4),
        SampledBlock(0, 6, 4, 8),
        SampledBlock(1, 9, 7, 8),
    }


def test_what_a_window_has_left_and_layers_of_another_stage_are_not_sampled():
    """Block 0 holds nothing."""
    assert set(chosen([[0, 0, 7], [1, 2, 3]], sizes=(4,), tokens=13)) == {SampledBlock(0, 7, 8, 12)}


def test_in_push_only_what_the_decode_engine_gets_is_sampled():
    """The rest is in its prefix cache."""
    wanted = [LentBlocks(4, 9, (BlockId(1), BlockId(2)))]

    assert set(chosen([[5, 6, 7]], tokens=10, wanted=wanted)) == {SampledBlock(0, 6, 4, 8), SampledBlock(0, 7, 8, 9)}


@given(count=st.integers(0, 60), most=st.integers(1, 20), name=st.text(max_size=8))
def test_a_block_is_sampled_once_and_the_samples_are_spread(count, most, name):
    """From a place that depends on the name, around the end of the prompt."""
    found = chosen([list(range(1, count + 1))], blocks=most, tokens=4 * count + 1, name=RequestId(name))
    places = sorted(each.start // 4 for each in found)

    assert len(found) == len(set(found)) == min(most, count)
    gaps = {(after - before) % count for before, after in zip(places, [*places[1:], *places[:1]], strict=True)}
    assert not gaps or count <= most or max(gaps) - min(gaps) <= 1


def test_every_block_is_sampled_for_some_name():
    """Otherwise a block that is always wrong would never be found."""
    names = [RequestId(f"cmpl-{number}") for number in range(500)]

    assert {chosen([list(range(1, 31))], blocks=1, tokens=121, name=name)[0].block for name in names} == {*range(1, 31)}
