"""Which blocks of windows stay out of the prefix cache. What comes of it, with vLLM's own: test_cache_kinds.py."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.partial_blocks import PartialBlocks

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
FULL = CacheGroup(8)
WINDOW = CacheGroup(8, window=6)
CHUNK = CacheGroup(8, chunk=12)
TOKENS = 67  # of which the window begins with number 62, in the block from 56 on


class Cache:
    """Ten blocks of each group, numbered with their group's number before, and a pool that caches what it may."""

    def __init__(self, *groups):
        self.cached = set()
        self.partial = PartialBlocks(groups)
        self.tables = [[10 * group + place for place in range(9)] for group in range(len(groups))]
        self.pool = SimpleNamespace(cache_full_blocks=self._cache)
        self.partial.keep_out_of(self.pool)

    def _cache(self, *, request, blocks, num_cached_blocks, num_full_blocks, block_size, block_mask=None):
        assert (request.request_id, block_size) == ("r", 8)
        new = blocks[num_cached_blocks:num_full_blocks]
        self.cached |= {block.block_id for block, may in zip(new, block_mask or [True] * 9, strict=False) if may}

    def left_out(self, sizes, external=TOKENS, mask=None):
        """Load, and cache a request's blocks number 1 to 8; return those that are not cached."""
        self.partial.loading("r", self.tables, TOKENS, external, sizes)
        wanted = set()
        for table in self.tables:
            self.pool.cache_full_blocks(
                request=SimpleNamespace(request_id="r"),
                blocks=[SimpleNamespace(block_id=block) for block in table],
                num_cached_blocks=1,
                num_full_blocks=8,
                block_size=8,
                block_mask=mask,
            )
            wanted |= set(table[1:8])
        return wanted - self.cached


@pytest.mark.parametrize(
    ("groups", "sizes", "left_out"),
    [
        ((FULL, WINDOW), [4, 4], {17}),
        ((FULL, WINDOW), [8, 8], set()),
        ((FULL, WINDOW), [8, 2], {17}),
        ((FULL, WINDOW), [16, 16], set()),
        ((FULL, WINDOW), [], {17}),  # push: P's blocks are not known here
        ((FULL,), [], set()),
        ((CHUNK,), [4], {7}),
    ],
)
def test_what_is_loaded_in_part_is_not_cached(groups, sizes, left_out):
    cache = Cache(*groups)

    assert cache.left_out(sizes) == left_out


def test_what_is_loaded_from_the_start_of_a_block_is_cached():
    """The prefix cache has what is before it."""
    assert Cache(FULL, WINDOW).left_out([4, 4], external=TOKENS - 64) == set()


def test_what_vllm_leaves_out_itself_stays_out():
    """Blocks of a window that can serve no hit."""
    assert Cache(WINDOW).left_out([4], mask=[False] * 3 + [True] * 4) == {1, 2, 3, 7}


def test_after_its_request_nothing_is_remembered():
    cache = Cache(WINDOW)
    cache.left_out([4])
    assert len(cache.partial) == 1
    cache.partial.over("r")

    assert len(cache.partial) == 0
