"""Ranks and readers: whenever a reader comes, it knows what the engine's events say."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.kv_events.event_hub import MAX_READERS, KVEventHub
from pdrelay_connector.core.kv_events.group_announcements import read_group_metadata
from pdrelay_connector.core.kv_events.reader_queue import MAX_BATCH, MAX_BEHIND_BATCHES, SIGN_OF_LIFE
from pdrelay_connector.errors import ProtocolViolation
from support.kv_events import EVENTS, StreamReader, batch, blocks_of, cleared, decoded, removed, stored


class Joined:
    """A reader of the hub, and its connection."""

    def __init__(self, hub):
        self.woken = 0
        self.reader = StreamReader()
        self.queue = hub.join(self._wake)

    def _wake(self):
        self.woken += 1

    def read(self, most=10**9):
        while most and (frame := self.queue.next_frame()) is not None:
            self.reader.feed(frame)
            most -= 1
        return self.reader


def hub_of(*ranks, **options):
    hub = KVEventHub(**options)
    for rank in ranks or (0,):
        hub.add_rank(rank)
    return hub


def types(reader):
    return [
        (found.data_parallel_rank, [type(event).__name__ for event in found.events])
        for found in map(decoded, reader.batches)
    ]


def test_first_comes_the_state_then_its_end_then_what_follows():
    """In the order that the wire promises: clears and blocks rank by rank, then an empty batch of each."""
    hub = hub_of(0, 1)
    hub.publish(1, batch(stored([b"a"]), rank=1, ts=7.0))
    joined = Joined(hub)
    hub.publish(0, batch(removed([b"x"])))

    assert types(joined.read()) == [
        (0, ["AllBlocksCleared"]),
        (1, ["AllBlocksCleared", "BlockStored"]),  # the group, without blocks
        (1, ["BlockStored"]),
        (0, []),
        (1, []),
        (0, ["BlockRemoved"]),
    ]
    assert decoded(joined.reader.batches[2]).ts == 7.0


@given(st.data())
def test_a_reader_knows_what_the_events_say_whenever_it_comes(data):
    """Batches of two ranks, readers that come, read some and go on, gaps, and too many blocks at times."""
    hub = hub_of(0, 1, max_blocks=data.draw(st.sampled_from([4, 1000])))
    readers = []
    direct = {0: set(), 1: set()}
    for _ in range(data.draw(st.integers(0, 25))):
        rank = data.draw(st.sampled_from([0, 1]))
        match data.draw(st.sampled_from(["events", "events", "events", "join", "read", "gap"])):
            case "events":
                payload = batch(*data.draw(st.lists(EVENTS, max_size=3)), rank=rank)
                before = hub.counts.overflows
                hub.publish(rank, payload)
                known = msgspec.msgpack.encode([0.0, _as_events(direct[rank]), rank])
                direct[rank] = blocks_of([known, payload], rank) if hub.counts.overflows == before else set()
            case "join":
                readers.append(Joined(hub))
            case "read":
                for joined in readers:
                    joined.read(data.draw(st.integers(0, 3)))
            case "gap":
                hub.forget(rank)
                direct[rank] = set()
    for joined in [*readers, Joined(hub)]:
        reader = joined.read()

        assert {rank: reader.names(rank) for rank in direct} == direct
        assert reader.complete == {0, 1}
    assert {rank: hub.blocks_of(rank).names() for rank in direct} == direct


def _as_events(names):
    return [stored([name], medium=place[0], group=place[1]) for name, place in names]


def announced(batch):
    """Return (group, kind, block size, window) of the events without blocks; vLLM's own classes read them."""
    return [
        (event.group_idx, event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window)
        for event in decoded(batch).events
        if type(event).__name__ == "BlockStored" and event.block_hashes == event.token_ids == []
    ]


GROUPS = read_group_metadata([
    {"group_idx": 1, "kind": "sliding_window", "block_size": 32, "sliding_window": 64},
    {"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None},
])  # fmt: skip
BOTH = [(0, "full_attention", 16, None), (1, "sliding_window", 32, 64)]


def test_groups_are_announced_before_blocks():
    """A group without a block would be unknown to a reader, and a hit would look too long."""
    hub = KVEventHub()
    hub.add_rank(0, GROUPS)
    hub.publish(0, batch(stored([b"a"])))
    first, second = Joined(hub).read().batches[:2]

    assert types(Joined(hub).read())[0] == (0, ["AllBlocksCleared", "BlockStored", "BlockStored"])
    assert announced(first) == BOTH
    assert announced(second) == []


def test_a_group_is_announced_when_its_blocks_are_gone():
    """What vLLM does not say, its events have said: also after a clear, a gap, and to the readers that are there."""
    hub = hub_of()
    windowed = stored([b"a"], group=3, size=8)
    windowed.kv_cache_spec_kind, windowed.kv_cache_spec_sliding_window = "sliding_window", 24
    hub.publish(0, batch(windowed, stored([b"a"]), stored([b"t"], medium="CPU", group=5), removed([b"a"], group=3)))
    hub.publish(0, batch(cleared()))
    early = Joined(hub)
    early.read()
    hub.forget(0)

    known = [(0, "full_attention", 4, None), (3, "sliding_window", 8, 24)]
    assert announced(early.read().batches[-1]) == announced(Joined(hub).read().batches[0]) == known


def test_parts_of_blocks_say_nothing_about_their_group():
    hub = hub_of()
    hub.publish(0, batch(stored([b"p"], size=2), stored([b"a"], size=4), stored([b"q"], size=2)))

    assert announced(Joined(hub).read().batches[0]) == [(0, "full_attention", 4, None)]


def test_groups_that_may_never_have_blocks_are_not_announced():
    """vLLM lists groups that it leaves out of prefix caching, and does not say which: readers would wait for ever."""
    names = ["unknown", "sliding_window_mla", "sliding_window", "mamba"]
    metadata = [{"group_idx": n, "kind": kind, "block_size": 4, "new": 1} for n, kind in enumerate(names)]

    assert [event.kv_cache_spec_kind for event in read_group_metadata(metadata)] == ["mamba"]


@pytest.mark.parametrize(
    "answer",
    [None, {}, [1], [{"kind": "mamba"}], [{"group_idx": 64, "kind": "mamba", "block_size": 4}], [{}] * 65],
)
def test_metadata_of_another_form_is_refused(answer):
    with pytest.raises(ProtocolViolation):
        read_group_metadata(answer)


def test_groups_have_a_bound():
    """Numbers of a broken engine take no memory."""
    hub = hub_of()
    hub.publish(0, batch(*(stored([b"%d" % n], group=n) for n in range(100))))

    assert [group for group, *_ in announced(Joined(hub).read().batches[0])] == list(range(64))


def test_a_batch_is_passed_on_as_it_was_published():
    """Fields and types that this version does not know reach readers that may know them."""
    hub = hub_of()
    joined = Joined(hub)
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockTouched", "x": 1}, {"type": "AllBlocksCleared"}], 0, "more"])
    hub.publish(0, payload)
    while (frame := joined.queue.next_frame()) is not None:
        last = frame

    assert last[12:] == payload
    assert hub.counts.unknown_events == 1
    assert hub.counts.refused_batches == 0


@pytest.mark.parametrize("said", [None, 5])
def test_a_batch_names_its_rank(said):
    hub = hub_of(3)
    joined = Joined(hub)
    hub.publish(3, batch(stored([b"a"]), rank=said))

    assert decoded(joined.read().batches[-1]).data_parallel_rank == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([0.0, ["BlockStored"], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "a"}], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved"}], 0]),
        msgspec.msgpack.encode([0.0, [{"type": b"\xff"}], 0]),
        batch(stored([b"b"]), removed([b"c" * MAX_BATCH])),
    ],
)
def test_a_batch_of_another_form_costs_what_was_known(payload):
    """It may have been a removal: nothing known is right, only poorer."""
    hub = hub_of()
    hub.publish(0, batch(stored([b"a"])))
    joined = Joined(hub)
    hub.publish(0, payload)
    hub.publish(0, batch(stored([b"z"])))

    assert {name for name, _ in joined.read().names()} == {b"z"}
    assert hub.counts.refused_batches == hub.counts.forgotten == 1


def test_too_many_blocks_are_forgotten_everywhere():
    hub = hub_of(max_blocks=2)
    joined = Joined(hub)
    hub.publish(0, batch(stored([b"a", b"b"])))
    known = set(joined.read().names())
    hub.publish(0, batch(stored([b"c"], parent=b"b")))

    assert len(known) == 2
    assert joined.read().names() == set()
    assert hub.counts.overflows == 1


def test_a_rank_that_is_gone_is_forgotten_by_readers():
    hub = hub_of(0, 1)
    hub.publish(1, batch(stored([b"a"]), rank=1))
    joined = Joined(hub)
    joined.read()
    hub.remove_rank(1)

    assert joined.read().names(1) == set()
    assert {rank for rank, _ in types(Joined(hub).read())} == {0}


def test_a_slow_reader_is_cut_off_by_the_number_of_batches():
    """It comes again and gets the state; nothing is held for it."""
    hub = hub_of()
    slow, quick = Joined(hub), Joined(hub)
    for _ in range(MAX_BEHIND_BATCHES):
        hub.publish(0, batch(cleared()))
        quick.read()
    before = slow.queue.closed
    hub.publish(0, batch(cleared()))

    assert (before, slow.queue.closed, quick.queue.closed) == (False, True, False)
    assert slow.queue.next_frame() is None
    assert (hub.readers, hub.counts.slow_readers) == (1, 1)


def test_a_slow_reader_is_cut_off_by_bytes():
    hub = hub_of(max_behind=1000)
    slow = Joined(hub)
    hub.publish(0, batch(stored([b"x" * 600])))
    before = slow.queue.closed
    hub.publish(0, batch(stored([b"x" * 600])))

    assert (before, slow.queue.closed) == (False, True)


def test_a_long_state_does_not_make_a_reader_slow():
    """It is composed as it is taken, and only what was published since counts."""
    hub = hub_of()
    for start in range(0, 60_000, 1000):
        hub.publish(0, batch(stored([n.to_bytes(32, "big") for n in range(start, start + 1000)], size=16)))
    joined = Joined(hub)
    hub.publish(0, batch(stored([b"last"])))

    assert len(joined.read().names()) == 60_001
    assert max(map(len, joined.reader.batches)) <= 256 << 10


def test_there_are_only_so_many_readers():
    hub = hub_of()
    readers = [Joined(hub) for _ in range(MAX_READERS)]
    refused = Joined(hub).queue
    hub.leave(readers[0].queue)
    hub.leave(readers[0].queue)

    assert refused is None
    assert Joined(hub).queue is not None


def test_a_reader_is_woken_for_each_batch():
    hub = hub_of()
    joined = Joined(hub)
    hub.publish(0, batch(cleared()))

    assert joined.woken == 1


def test_a_sign_of_life_is_a_length_of_nothing():
    reader = StreamReader()
    reader.feed(SIGN_OF_LIFE)

    assert reader.signs_of_life == 1
