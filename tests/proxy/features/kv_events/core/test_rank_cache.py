"""The hit of a prompt in groups with windows: as vLLM would find it, in a time that the prompt bounds."""

import random
from math import lcm

import pytest

from pdrelay_proxy.features.kv_events.core.rank_cache import GroupBlocks, RankCache
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt


class CountedBlocks(dict):
    """Blocks that count how often one is looked for."""

    asked = 0

    def __contains__(self, block):
        self.asked += 1
        return super().__contains__(block)


def cache_of(blocks, tails):
    """Return a cache with all blocks of a prompt in a full group of size 2, and the prompt.

    ``tails``: by group its size in blocks of the full one, the blocks that it needs, and the places of those it has.
    """
    prompt = TokenPrompt(range(2 * blocks + 1))
    full = GroupBlocks(2, is_full=True, needed=1)
    keys = prompt.keys(2, None)
    full.hash_of = {prompt.more(keys, 2, None): 2 * place + 2 for place in range(blocks)}
    cache = RankCache()
    cache.groups[0] = full
    for number, (size, needed, places) in enumerate(tails, start=1):
        group = cache.groups[number] = GroupBlocks(2 * size, is_full=False, needed=needed)
        group.copies = CountedBlocks.fromkeys(places, 1)
    return cache, prompt


def asked(cache):
    return sum(group.copies.asked for group in cache.groups.values() if not group.is_full)


def test_a_hit_ends_where_every_group_has_what_it_needs():
    """As far behind as possible; compared with a look at each end."""
    chance = random.Random(7)
    for _ in range(150):
        blocks = chance.randint(1, 40)
        share = chance.random() ** 0.3
        tails = []
        for _ in range(chance.randint(1, 4)):
            size = chance.choice([1, 1, 2, 3])
            ends = range(2 * size, 2 * blocks + 1, 2 * size)
            tails.append((size, chance.randint(1, 6), [end for end in ends if chance.random() < share]))
        cache, prompt = cache_of(blocks, tails)
        step = 2 * lcm(*[size for size, _, _ in tails])
        best = 0
        for end in range(step, 2 * blocks + 1, step):
            needs = [range(end, max(0, end - 2 * size * needed), -2 * size) for size, needed, _ in tails]
            if all(set(need) <= set(places) for need, (_, _, places) in zip(needs, tails, strict=True)):
                best = end

        assert cache.cached(prompt, None) == best


@pytest.mark.parametrize("order", [1, -1])
def test_no_engine_makes_a_look_take_longer_than_its_prompt_is_long(order):
    """Each end was tried with all of a window before it: seconds, on the event loop, for a prompt of 100,000 tokens."""
    blocks = 2000
    ends = range(2, 2 * blocks + 1, 2)
    holes = [
        (1, 2**31, ends[1:]),  # a window without end that lacks its first block
        (1, 500, [end for end in ends if end % 1000]),
        (1, 1, [end for end in ends if end % 8]),
        (1, 1, [end for end in ends if end % 8 != 2]),
        (1, 1, [end for end in ends if end % 8 not in (4, 6)]),
    ]
    cache, prompt = cache_of(blocks, holes[::order])

    assert cache.cached(prompt, None) == 0
    assert asked(cache) < 3 * blocks * len(holes)
