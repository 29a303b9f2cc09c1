"""What a rank has cached, and what a reader who comes late is told."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.kv_events.cached_blocks import MAX_BATCH_BYTES, CachedBlocks
from pdrelay_connector.core.kv_events.event_batch import decode_batch
from pdrelay_connector.errors import ProtocolViolation
from support.kv_events import EVENTS, GPU, batch, blocks_of, cleared, decoded, follow_frames, removed, stored


def after(*events, limit=1000):
    cache = CachedBlocks(limit)
    cache.apply(decode_batch(batch(*events)).events)
    return cache


def snapshot(cache):
    """Return the events of a snapshot as a reader decodes them."""
    return [event for payload in cache.snapshot(ts=1.0, rank=0) for event in decoded(payload).events]


def order(cache):
    return [name for event in snapshot(cache) for name in event.block_hashes]


def test_a_chain_is_told_as_it_was_stored():
    """The same event, so that a reader needs no other code for the state than for what follows."""
    event = stored([b"a", b"b", b"c"])

    assert snapshot(after(event)) == [event]


def test_chains_that_share_a_beginning_keep_their_parents():
    cache = after(stored([b"a", b"b"]), stored([b"c"], parent=b"a"), stored([b"d"], parent=b"c"))

    assert order(cache) == [b"a", b"b", b"c", b"d"]
    assert [event.parent_block_hash for event in snapshot(cache)] == [None, b"a"]


def test_a_parent_that_was_stored_again_comes_first():
    """vLLM evicts a parent before its child when the child is in use, and computes it again later."""
    cache = after(stored([b"a", b"b", b"c"]), removed([b"a"]), stored([b"a"]))

    assert order(cache) == [b"a", b"b", b"c"]


def test_a_child_without_its_parent_is_told_all_the_same():
    assert order(after(stored([b"a", b"b"]), removed([b"a"]))) == [b"b"]


def test_a_removal_takes_a_block_from_its_own_place_only():
    """The same hash is in a KV cache group each, and in host memory."""
    cache = after(stored([b"a"], group=0), stored([b"a"], group=1), stored([b"a"], medium="CPU"), removed([b"a"]))

    assert cache.names() == {(b"a", (GPU, 1, None, None)), (b"a", ("CPU", 0, None, None))}
    assert len(snapshot(cache)) == 2


def test_a_clear_takes_all():
    assert after(stored([b"a"]), stored([b"a"], group=1), cleared()).names() == set()


def test_events_behind_a_clear_count():
    assert order(after(stored([b"a"]), cleared(), stored([b"b"]))) == [b"b"]


def test_extra_keys_stay_with_their_block():
    """A salt is in the first block's hash only."""
    event = stored([b"a", b"b", b"c"])
    event.extra_keys = [("salt",), None, None]
    found = snapshot(after(event))

    assert [(each.block_hashes, each.extra_keys) for each in found] == [([b"a"], [("salt",)]), ([b"b", b"c"], None)]
    assert found[1].parent_block_hash == b"a"


@pytest.mark.parametrize(("tokens", "size"), [([1, 2, 3], 4), ([], 0), ([1] * 8, 4)])
def test_blocks_whose_tokens_are_unclear_are_told_without(tokens, size):
    """Groups with sliding windows leave blocks out, and offloaded blocks may have no tokens (offloading/events.py)."""
    event = stored([b"a", b"b", b"c"])
    event.token_ids, event.block_size = tokens, size

    assert order(after(event)) == [b"a", b"b", b"c"]
    assert all(each.token_ids == [] for each in snapshot(after(event)))


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_impossible_tokens_are_refused(token):
    event = stored([b"a"])
    event.token_ids[0] = token
    with pytest.raises(ProtocolViolation, match="out of range"):
        after(event)


def test_too_many_blocks_are_all_forgotten():
    cache = CachedBlocks(limit=3)
    kept = cache.apply(decode_batch(batch(stored([b"a", b"b", b"c"]))).events)
    forgotten = cache.apply(decode_batch(batch(stored([b"d"], parent=b"c"))).events)

    assert (kept, forgotten, cache.overflows, len(cache)) == (True, False, 1, 0)


def test_a_block_that_is_larger_than_a_batch_is_not_kept():
    assert order(after(stored([b"a"], size=MAX_BATCH_BYTES), stored([b"b"]))) == [b"b"]


def test_a_snapshot_comes_in_batches_of_bounded_size():
    names = [number.to_bytes(32, "big") for number in range(20_000)]
    cache = CachedBlocks()
    for start in range(0, 20_000, 10):
        # each of them a chain of its own
        cache.apply(decode_batch(batch(stored(names[start : start + 10], size=16))).events)
    payloads = list(cache.snapshot(ts=1.0, rank=3))

    assert max(map(len, payloads)) <= MAX_BATCH_BYTES
    assert sum(map(len, payloads)) / len(payloads) > MAX_BATCH_BYTES / 3
    assert {decoded(payload).data_parallel_rank for payload in payloads} == {3}
    assert {name for payload in payloads for event in decoded(payload).events for name in event.block_hashes} == {
        *names
    }


def test_a_snapshot_is_that_of_its_moment():
    """It is composed while the reader takes it, and the batches since follow it."""
    cache = after(stored([b"a", b"b"]))
    pieces = cache.snapshot(ts=1.0, rank=0)
    cache.apply(decode_batch(batch(removed([b"a"]), stored([b"c"]))).events)

    assert [event.block_hashes for piece in pieces for event in decoded(piece).events] == [[b"a", b"b"]]


def test_a_loop_of_parents_ends():
    """No engine sends it; whoever does must not stop the server."""
    assert set(order(after(stored([b"a"], parent=b"b"), stored([b"b"], parent=b"a")))) == {b"a", b"b"}


@given(st.lists(EVENTS, max_size=30))
def test_a_snapshot_tells_the_same_blocks_parents_first(events):
    cache = after(*events)
    told = snapshot(cache)
    seen = set()
    names = {name for name, _ in cache.names()}

    assert blocks_of([msgspec.msgpack.encode([0.0, told, 0])]) == cache.names() == blocks_of([batch(*events)])
    for event in told:
        for parent, name in zip([event.parent_block_hash, *event.block_hashes], event.block_hashes, strict=False):
            assert parent in seen or parent not in names
            seen.add(name)


def test_what_a_stream_tells_is_decoded_by_vllms_own_classes():
    """``decoded`` is vLLM's KVEventBatch."""
    frames = [
        (len(payload) + 8).to_bytes(4, "big") + number.to_bytes(8, "big") + payload
        for number, payload in enumerate(after(stored([b"a"])).snapshot(ts=1.0, rank=0))
    ]

    assert follow_frames(b"".join(frames)).names(0) == {(b"a", (GPU, 0, None, None))}
