"""Which blocks of windows leave the prefix cache. What comes of it, with vLLM's own: test_cache_kinds.py."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.partial_blocks import PartialBlocks

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
FULL, WINDOW, CHUNK = CacheGroup(8), CacheGroup(8, window=6), CacheGroup(8, chunk=12)
TOKENS = 67  # of which the window begins with number 62, in the block from 56 on


class Cache:
    """Ten blocks of each group, numbered with their group's number before; vLLM's pool is told which to evict."""

    def __init__(self, *groups):
        self.evicted = set()
        pool = SimpleNamespace(evict_blocks=self.evicted.update)
        self.partial = PartialBlocks(groups, lambda: pool)
        self.tables = [[10 * group + place for place in range(9)] for group in range(len(groups))]
        self.request = SimpleNamespace(request_id="r", status=RequestStatus.WAITING_FOR_REMOTE_KVS)

    def load(self, sizes, external=TOKENS):
        self.partial.loading(self.request, self.tables, TOKENS, external, sizes)


@pytest.mark.parametrize(
    ("groups", "sizes", "evicted"),
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
def test_what_is_loaded_in_part_leaves_the_cache(groups, sizes, evicted):
    """As soon as vLLM has entered it."""
    cache = Cache(*groups)
    cache.load(sizes)
    assert cache.evicted == set()
    cache.partial.evict("r")

    assert cache.evicted == evicted
    assert len(cache.partial) == 0


def test_what_is_loaded_from_the_start_of_a_block_stays():
    """The prefix cache has what is before it."""
    cache = Cache(FULL, WINDOW)
    cache.load([4, 4], external=TOKENS - 64)
    cache.partial.evict("r")

    assert cache.evicted == set()


def test_a_load_that_found_no_block_for_its_next_token_is_noticed_with_the_step():
    """VLLM has cached its blocks, and will look for another request's prefix in the next step."""
    cache = Cache(WINDOW)
    cache.load([4])
    cache.partial.step()
    assert (cache.evicted, len(cache.partial)) == (set(), 1)
    cache.request.status = RequestStatus.WAITING
    cache.partial.step()

    assert (cache.evicted, len(cache.partial)) == ({7}, 0)
