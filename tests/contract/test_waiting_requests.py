"""In which order vLLM's scheduler asks about a waiting request, and which of its fields we read.

``shell/block_shortage.py`` takes a request that was asked about, and not told of, for one that lacks blocks.
"""

import inspect
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


def test_hooks_of_a_waiting_request_come_in_order():
    """And the step ends after that, with what we have noted."""
    source = inspect.getsource(Scheduler.schedule)
    asked = source.index("get_num_new_matched_tokens(")
    steps = [
        asked,
        source.index("kv_cache_manager.allocate_slots(", asked),
        source.index("if new_blocks is None:", asked),
        source.index("update_state_after_alloc(", asked),
        source.index("_build_kv_connector_meta(", asked),
    ]

    assert steps == sorted(steps)
    assert source[steps[2] : steps[3]].count("break") == 1, "a request that lacks blocks ends the walk"


def test_requests_and_pools_have_what_we_read():
    """A name that is gone would stop the engine at the first lack."""
    assert "priority" in inspect.signature(Request.__init__).parameters
    assert isinstance(Request.num_tokens, property)
    assert "num_gpu_blocks" in inspect.signature(BlockPool.__init__).parameters
    assert callable(BlockPool.get_num_free_blocks)
    assert "block_hashes" in inspect.getsource(Request.__init__)
    assert "hash_block_size" in inspect.signature(BlockPool.__init__).parameters
    assert [*inspect.signature(BlockPool.get_cached_block).parameters][1:] == ["block_hash", "kv_cache_group_ids"]


def test_vllm_keeps_blocks_free_for_prompts_that_are_not_there_yet():
    """``shell/failed_loads.py`` ends it for a load that failed, as vLLM does for a request that it preempts."""
    kept = inspect.getsource(Scheduler._inflight_prefill_reserved_blocks)

    assert "in self._inflight_prefills" in kept
    assert "self._inflight_prefills.discard(request)" in inspect.getsource(Scheduler._preempt_request)


def test_free_blocks_that_are_cached_for_a_request_count_as_blocks_to_allocate():
    """They leave the free list, too: a request can lack blocks although as many are free as it has yet to fill."""
    source = inspect.getsource(SingleTypeKVCacheManager.get_num_blocks_to_allocate)

    assert "return num_new_blocks + num_evictable_blocks" in source
