"""Whether a request that waits lacks blocks, with vLLM's own block pool."""

import warnings

import pytest

from pdrelay_connector.core.layout.cache_groups import CacheGroup

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from pdrelay_connector.shell.block_shortage import BlockShortage

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS, CACHED, WAIT = 4, 12, 4, 10.0


def short_after_a_wait(*, needs, in_use=0, group=None):
    """Have a request wait whose first blocks are cached, and nothing else is free; tell how many blocks it lacks."""
    init_none_hash(sha256)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
    hasher = get_request_block_hasher(SIZE, sha256)
    request = Request("waits", list(range(SIZE * needs)), SamplingParams(), None, block_hasher=hasher)
    blocks = pool.get_new_blocks(BLOCKS - 1)
    pool.cache_full_blocks(request, blocks, 0, CACHED, SIZE, 0)
    pool.free_blocks(blocks[in_use:CACHED])
    shortage = BlockShortage([group or CacheGroup(SIZE)], threshold=WAIT)

    shortage.considered(request, SIZE * CACHED)
    assert shortage.step(pool, now=0.0) is None
    shortage.considered(request, SIZE * CACHED)
    short = shortage.step(pool, now=WAIT)
    return short.blocks if short is not None else 0


def test_free_blocks_that_are_cached_for_a_request_are_no_room_for_its_other_tokens():
    """VLLM refuses it: each free block is one that it would use already. If nobody notices, leases keep it waiting."""
    assert short_after_a_wait(needs=CACHED + 3) == 3


def test_cached_blocks_that_others_use_take_no_room():
    """They are not free, so the request needs none of the free ones for them."""
    assert short_after_a_wait(needs=CACHED + 3, in_use=3) == 3


def test_a_request_whose_blocks_are_all_cached_lacks_none():
    assert short_after_a_wait(needs=CACHED) == 0


def test_of_a_sliding_window_only_the_blocks_in_the_window_are_cached_for_a_request():
    """VLLM uses no block before it, though it is free and has the right KV."""
    assert short_after_a_wait(needs=CACHED + 4, group=CacheGroup(SIZE, window=SIZE)) == 1
