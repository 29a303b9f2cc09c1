"""What an engine tells of its cache, out of bytes that come in any pieces and may be anything."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.features.kv_events.core.event_stream import (
    FRAME_MOST,
    KvEventStream,
    read_batch,
    read_event,
)
from pdrelay_proxy.features.kv_events.errors import BadKvEvents
from pdrelay_proxy.features.kv_events.event_schemas import EVENTS_MOST, AllBlocksCleared, BlockRemoved, BlockStored

STORED = {"type": "BlockStored", "block_hashes": [b"a"], "token_ids": [1, 2], "block_size": 2}


def frame(number, payload=b""):
    return (len(payload) + 8).to_bytes(4, "big") + number.to_bytes(8, "big") + payload


def raw(value):
    return msgspec.Raw(msgspec.msgpack.encode(value))


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_the_payloads_come_out_however_the_bytes_are_cut(payloads, data):
    """TCP cuts anywhere; signs of life may be between any two."""
    whole = b"".join(frame(number, payload) + bytes(4) for number, payload in enumerate(payloads))
    stream = KvEventStream()
    found = []
    at = 0
    while at < len(whole):
        step = data.draw(st.integers(1, 50))
        found += stream.feed(whole[at : at + step])
        at += step

    assert found == payloads


def test_a_hash_is_as_long_as_a_hash():
    """The index counts blocks: half a million of them with hashes of 30 KB would be the router's whole memory."""
    longest, longer = b"h" * 64, b"h" * 65
    stored = read_event(raw(STORED | {"block_hashes": [longest], "parent_block_hash": longest}))

    assert isinstance(stored, BlockStored)
    assert read_event(raw(STORED | {"block_hashes": [longer]})) is None
    assert read_event(raw(STORED | {"parent_block_hash": longer})) is None
    with pytest.raises(BadKvEvents):
        read_event(raw({"type": "BlockRemoved", "block_hashes": [longer]}))


@pytest.mark.parametrize(
    "bad",
    [
        (FRAME_MOST + 1).to_bytes(4, "big"),
        (1 << 31).to_bytes(4, "big") + b"x",
        (7).to_bytes(4, "big"),
        frame(1),
        frame(0) + frame(2),
        frame(0) + frame(0),
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_what_cannot_be_right_ends_the_stream(bad):
    """Before more of it is read, and whatever is missing: nothing is known any more."""
    with pytest.raises(BadKvEvents):
        KvEventStream().feed(bad)


def test_the_longest_frame_is_taken():
    """And no byte more is held than it has."""
    stream = KvEventStream()
    payload = bytes(FRAME_MOST - 8)
    whole = frame(0, payload)
    assert stream.feed(whole[:-1]) == []
    assert stream.feed(whole[-1:] + b"\0") == [payload]


@pytest.mark.parametrize("tail", [[], [None], [3], [3, "of a later version"]])
def test_a_batch_is_read_without_its_events(tail):
    """The rank may be absent, and later versions may say more."""
    found = read_batch(msgspec.msgpack.encode([1.5, [{"type": "of a later version"}], *tail]))

    assert found.data_parallel_rank == (tail[0] if tail else None)
    assert [read_event(event) for event in found.events] == [None]


@given(st.binary(max_size=60))
def test_bytes_that_are_no_batch_are_said_to_be_none(data):
    """Never another exception."""
    try:
        for event in read_batch(data).events:
            read_event(event)
    except BadKvEvents:
        pass


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, {}], [1.0, [], -1], [1.0, [], "0"], [1.0, [], 5000], {}, 3])
def test_a_batch_of_another_shape_is_refused(bad):
    """Types are strict."""
    with pytest.raises(BadKvEvents):
        read_batch(msgspec.msgpack.encode(bad))


def test_a_batch_of_nothing_but_events_is_refused_before_it_is_taken_apart():
    """A frame of nils made 16 million objects, in a GB and most of a second."""
    most = b"\x93" + msgspec.msgpack.encode(1.0) + b"\xdd"
    whole = most + EVENTS_MOST.to_bytes(4, "big") + b"\xc0" * (EVENTS_MOST + 1)
    assert len(read_batch(whole).events) == EVENTS_MOST
    with pytest.raises(BadKvEvents, match=f"of length <= {EVENTS_MOST}"):
        read_batch(most + (EVENTS_MOST + 1).to_bytes(4, "big") + b"\xc0" * (EVENTS_MOST + 2))


def test_events_are_read_by_their_types():
    """Fields of later versions are left out."""
    assert read_event(raw(STORED | {"of_a_later_version": [1]})) == BlockStored([b"a"], [1, 2], 2)
    assert read_event(raw({"type": "BlockRemoved", "block_hashes": [7], "medium": None})) == BlockRemoved([7])
    assert isinstance(read_event(raw({"type": "AllBlocksCleared"})), AllBlocksCleared)


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "BlockMoved", "block_hashes": [b"a"]},
        STORED | {"token_ids": ["1", 2]},
        STORED | {"token_ids": [-1, 2]},
        STORED | {"token_ids": [1 << 32, 2]},
        STORED | {"block_size": 0},
        STORED | {"block_hashes": ["text"]},
        STORED | {"group_idx": 64},
        STORED | {"extra_keys": ["s"]},
    ],
)
def test_what_is_stored_in_an_unknown_way_is_left_out(odd):
    """The router then knows less than it could, which is never wrong."""
    assert read_event(raw(odd)) is None


@pytest.mark.parametrize(
    "bad",
    [{"type": "BlockRemoved"}, {"type": "BlockRemoved", "block_hashes": "a"}, {"no": "type"}, [], 3, {"type": 3}],
)
def test_what_may_be_gone_must_be_readable(bad):
    """Else the router would believe in blocks that are not there."""
    with pytest.raises(BadKvEvents):
        read_event(raw(bad))
