"""Which blocks are sampled: those that hold something that a decode engine gets, spread over the prompt."""

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.messages import LentBlocks
from pdrelay_connector.core.verify.sampling import SampledBlock, Sampling

NAME = RequestId("a")


def chosen(groups, *, blocks=256, sizes=(4, 4), states=(), tokens=10, wanted=None, name=NAME):
    """Return what a sampling of all prefills chooses."""
    sampling = Sampling(1.0, blocks)
    return sampling.choose(name, groups, sizes=dict(enumerate(sizes)), states=set(states), tokens=tokens, lent=wanted)


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


def chosen_one_by_one(groups, *, blocks, sizes, states, tokens, wanted, name):
    """Return the same choice, out of a list of all candidates: as slow as the prompt is long."""
    found = []
    end = tokens if states else tokens - 1
    for group, ids in enumerate(groups):
        if group >= len(sizes):
            continue
        if group in states:
            found += [SampledBlock(group, block, tokens - 1, tokens) for block in ids[-1:] if block]
            continue
        for number, block in enumerate(ids):
            start = number * sizes[group]
            stop = min((number + 1) * sizes[group], end)
            if block and start < stop:
                found.append(SampledBlock(group, block, start, stop))
    if wanted is not None:
        found = [
            each for each in found if wanted[each.group].start <= each.start and each.stop <= wanted[each.group].stop
        ]
    count = min(blocks, len(found))
    first = crc32(name.encode()[::-1])
    return tuple(found[(first + number * len(found) // count) % len(found)] for number in range(count))


@given(st.data())
def test_the_choice_is_that_out_of_all_candidates(data):
    """Whatever windows have left, states, and other stages there are, and whatever the decode engine wants."""
    groups = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=len(groups)))
    states = data.draw(st.sets(st.integers(0, 3)))
    lent = st.builds(LentBlocks, st.integers(0, 50), st.integers(0, 50), st.just(()))
    options = {
        "blocks": data.draw(st.integers(1, 9)),
        "sizes": sizes,
        "states": states,
        "tokens": data.draw(st.integers(0, 50)),
        "wanted": data.draw(st.none() | st.lists(lent, min_size=len(groups), max_size=len(groups))),
        "name": RequestId(data.draw(st.text(max_size=8))),
    }

    assert chosen(groups, **options) == chosen_one_by_one(groups, **options)


class Prompt(list):
    """Blocks, and how many were looked at one by one."""

    looks = 0

    def __getitem__(self, place):
        self.looks += isinstance(place, int)
        return super().__getitem__(place)

    def __iter__(self):
        self.looks += len(self)
        return super().__iter__()


def test_a_long_prompt_is_not_looked_at_block_by_block():
    """The engine's thread chooses, between two steps of all other requests."""
    prompt = Prompt(range(1, 8193))
    assert len(chosen([prompt], blocks=8, tokens=4 * 8192)) == 8

    assert prompt.looks == 8
