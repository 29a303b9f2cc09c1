"""What vLLM does with KV cache groups and layouts, and what the connector takes it to do."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        SlidingWindowManager,
    )
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from pdrelay_connector.shell.cache_specs import group_of

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=24)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=24)
RETAINING = SlidingWindowSpec(**SHAPE, sliding_window=24, extra_retained_tokens=3)


@pytest.mark.parametrize(
    ("spec", "manager", "fields"),
    [
        (FULL, FullAttentionManager, {}),
        (SLIDING, SlidingWindowManager, {"sliding_window": 24, "extra_retained_tokens": 0}),
        (RETAINING, SlidingWindowManager, {"sliding_window": 24, "extra_retained_tokens": 3}),
        (CHUNKED, ChunkedLocalAttentionManager, {"attention_chunk_size": 24}),
    ],
    ids=["full", "sliding window", "sliding window with spare tokens", "chunks"],
)
def test_a_group_forgets_what_vllm_forgets(spec, manager, fields):
    """A token less would be read from a block that is not held; vLLM's own allocation skips just as many."""
    group = group_of(spec)

    for computed in range(1, 100):
        assert group.first_needed(computed) == manager.get_num_skipped_tokens(SimpleNamespace(**fields), computed)


def test_layers_that_differ_in_their_sizes_only_are_one_group():
    """vLLM puts such layers under one block table."""
    together = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"l.0": SLIDING, "l.1": SLIDING})

    assert group_of(together) == group_of(SLIDING) == CacheGroup(16, window=24)


def test_mla_is_full_attention_with_one_head():
    """Every rank keeps the same."""
    assert group_of(MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})) == CacheGroup(16)


def test_there_are_just_these_layouts():
    """Each is a permutation of layers, blocks, heads and tokens: the content is innermost in all of them."""
    assert {layout.name for layout in KVCacheLayout} == {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}
    assert all(layout.stride_order[-1] == 4 for layout in KVCacheLayout)
