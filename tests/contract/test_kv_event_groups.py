"""The KV cache groups that are announced to readers of KV events are those that vLLM's events name."""

import warnings
from types import SimpleNamespace

import msgspec
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm import SamplingParams
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

from pdrelay_connector.core.kv_events.event_hub import KVEventHub
from pdrelay_connector.core.kv_events.group_announcements import read_group_metadata
from support.kv_events import decoded, follow_frames

pytestmark = [
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
    pytest.mark.skipif(
        not hasattr(EngineCore, "get_kv_cache_group_metadata"),
        reason="this vLLM neither lists its KV cache groups nor says where its events are",
    ),
]
SIZE = 4
ATTENTION = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
SPECS = {
    "full": [FullAttentionSpec(block_size=SIZE, **ATTENTION)],
    "sliding window": [
        FullAttentionSpec(block_size=SIZE, **ATTENTION),
        SlidingWindowSpec(block_size=SIZE, **ATTENTION, sliding_window=11),
    ],
    "state": [
        FullAttentionSpec(block_size=SIZE, **ATTENTION),
        MambaSpec(block_size=SIZE, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"),
    ],
}


def group(event):
    return event.group_idx, event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window


def first_batch(hub):
    return decoded(follow_frames(hub.join(lambda: None).next_frame()).batches[0])


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_a_reader_learns_the_same_groups_from_the_engine_as_from_its_events(specs):
    """To the number, the kind, the size of a block and the window; and the medium is the events', too."""
    groups = [KVCacheGroupSpec([f"layer.{place}"], spec) for place, spec in enumerate(specs)]
    init_none_hash(sha256)
    cache = KVCacheManager(KVCacheConfig(40, [], groups), 256, SIZE, SIZE, enable_kv_cache_events=True)
    engine = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=cache.kv_cache_config, kv_cache_manager=cache))
    said, learned = KVEventHub(), KVEventHub()
    said.add_rank(0, read_group_metadata(EngineCore.get_kv_cache_group_metadata(engine)))
    learned.add_rank(0)
    request = Request(
        "r", list(range(30)), SamplingParams(max_tokens=5), None, block_hasher=get_request_block_hasher(SIZE, sha256)
    )
    blocks, hit, _ = cache.get_computed_blocks(request)
    cache.allocate_slots(request, 30 - hit, hit, blocks)
    events = cache.take_events()
    learned.publish(0, msgspec.msgpack.encode(KVEventBatch(0.0, events, 0)))
    told = [group(event) for event in first_batch(said).events[1:]]

    assert told == [group(event) for event in first_batch(learned).events[1:]]
    assert told == sorted({group(event) for event in events})
    assert len(told) == len(specs)
    assert {event.medium for event in first_batch(said).events[1:]} == {event.medium for event in events}
