"""The index of what engines have cached: never more than they have told, exact where they tell all, and bounded."""

import random
from collections import Counter
from hashlib import sha256

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.kv_events.core.cache_index import RANKS_MOST, CacheIndex
from pdrelay_proxy.features.kv_events.core.event_stream import BadKvEvents, read_batch
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt
from support.searching import examples

D0, D1 = InstanceId("decode-0"), InstanceId("decode-1")
SIZE = 2
FULL = "full_attention"
WINDOW = "sliding_window"
STATE = "mamba"


def names(ids, size=SIZE):
    """Hashes as an engine's might be: each of all that comes before its end."""
    return [sha256(repr(ids[: end + size]).encode()).digest() for end in range(0, len(ids) - size + 1, size)]


def stored(ids, *, start=0, group=0, kind=FULL, size=SIZE, **more):
    """The event of a prompt's blocks from one on."""
    blocks = names(ids, size)
    return {
        "type": "BlockStored",
        "block_hashes": blocks[start:],
        "parent_block_hash": blocks[start - 1] if start else None,
        "token_ids": ids[start * size : len(blocks) * size],
        "block_size": size,
        "medium": "GPU",
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        **more,
    }


def removed(*blocks, group=0, **more):
    return {"type": "BlockRemoved", "block_hashes": [*blocks], "medium": "GPU", "group_idx": group, **more}


CLEARED = {"type": "AllBlocksCleared"}


def send(index, *events, engine=D0, rank=0):
    """Apply a batch; return in how many steps."""
    return 1 + sum(1 for _ in index.apply(engine, read_batch(msgspec.msgpack.encode([0.0, events, rank]))))


def following(*, ranks=(0,), **limits):
    index = CacheIndex(**limits)
    index.open(D0, {D0: None})
    for rank in ranks:
        send(index, CLEARED, rank=rank)
        send(index, rank=rank)
    return index


def cached(index, ids, name=D0, lora=None):
    return index.cached(name, TokenPrompt(ids), lora)


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_prompt_is_found_up_to_its_first_missing_block():
    """And the last token is always computed (``get_computed_blocks`` in vllm/v1/core/kv_cache_manager.py)."""
    index = following()
    send(index, stored(PROMPT))

    assert cached(index, [*PROMPT, 9]) == 8
    assert cached(index, PROMPT) == 6
    assert cached(index, [1, 2, 3, 9, 5]) == 2
    send(index, removed(names(PROMPT)[1]))
    assert cached(index, [*PROMPT, 9]) == 2
    send(index, stored(PROMPT[:4], start=1))
    assert cached(index, [*PROMPT, 9]) == 8


def test_a_block_that_was_stored_twice_is_there_until_it_is_removed_twice():
    """vLLM keeps equal blocks of two requests apart, and evicts each for itself."""
    index = following()
    send(index, stored(PROMPT), stored(PROMPT))
    send(index, *(removed(name) for name in names(PROMPT)))
    assert cached(index, [*PROMPT, 9]) == 8
    send(index, *(removed(name) for name in names(PROMPT)), removed(b"of nobody"))
    assert (cached(index, [*PROMPT, 9]), len(index)) == (0, 0)


def test_blocks_behind_an_unknown_one_are_left_out_and_counted():
    """Their contents are not known."""
    index = following()
    send(index, stored(PROMPT, start=1))

    assert (len(index), cached(index, PROMPT), index.take_counts(D0).unknown_parents) == (0, 0, 3)


def test_nothing_is_known_before_the_state_has_come_whole():
    """The router then keeps to what it has sent."""
    index = CacheIndex()
    assert cached(index, PROMPT) is None
    index.open(D0, {D0: None})
    assert cached(index, PROMPT) is None
    send(index, CLEARED, stored(PROMPT))
    assert cached(index, PROMPT) is None
    send(index)
    assert cached(index, PROMPT) == 6
    index.forget(D0)
    assert (cached(index, PROMPT), len(index)) == (None, 0)


def test_ranks_have_caches_of_their_own():
    """An instance of all ranks has what every rank has: it chooses among them itself."""
    index = CacheIndex()
    index.open(D0, {D0: 0, D1: 1})
    for rank, ids in enumerate((PROMPT, PROMPT[:4])):
        send(index, CLEARED, stored(ids), rank=rank)
        send(index, rank=rank)
    assert (cached(index, [*PROMPT, 9], D0), cached(index, [*PROMPT, 9], D1)) == (8, 4)

    both = following(ranks=(0, 1))
    send(both, stored(PROMPT), rank=0)
    assert cached(both, PROMPT) == 0
    send(both, CLEARED, rank=0)
    send(both, stored(PROMPT), rank=1)
    assert cached(both, PROMPT) == 0


def test_a_reset_empties_one_rank():
    """The other engines and ranks have nothing to do with it."""
    index = CacheIndex()
    index.open(D0, {D0: 0, D1: 1})
    for rank in (0, 1):
        send(index, stored(PROMPT), rank=rank)
        send(index, rank=rank)
    send(index, CLEARED, rank=1)

    assert (cached(index, PROMPT, D0), cached(index, PROMPT, D1)) == (6, 0)
    assert len(index) == 4


def test_adapters_and_salts_are_other_contents():
    """The name of an adapter is in all its blocks, a salt in the first."""
    index = following()
    keys = [("fr", "s"), ("fr",), ("fr",), ("fr",)]
    send(index, stored(PROMPT, lora_name="fr", extra_keys=keys))
    salted = TokenPrompt(PROMPT, "s")

    assert (index.cached(D0, salted, "fr"), index.cached(D0, salted, None), cached(index, PROMPT, lora="fr")) == (
        6,
        0,
        0,
    )


def test_other_tiers_do_not_count():
    """What an engine has offloaded is not in the cache that these blocks are removed from."""
    index = following()
    send(index, stored(PROMPT, medium="CPU"), stored(PROMPT, locality="REMOTE"))
    assert len(index) == 0
    send(index, stored(PROMPT), removed(*names(PROMPT), medium="CPU"))
    assert cached(index, PROMPT) == 6


@pytest.mark.parametrize(
    "odd",
    [
        stored(PROMPT) | {"token_ids": PROMPT[:-1]},
        stored(PROMPT) | {"extra_keys": [None]},
        stored([1], size=1, group=0),
        {"type": "BlockMoved"},
    ],
)
def test_odd_events_are_left_out(odd):
    """Of a block whose tokens are not known nobody can say what is in it."""
    index = following()
    send(index, stored([9, 9]))
    send(index, odd)

    assert (len(index), index.take_counts(D0).ignored) == (1, 1)


def test_larger_blocks_take_the_place_of_parts():
    """``cache_partial_block`` tells of the beginning of a block; what is looked up are whole ones."""
    index = following()
    send(index, stored([1], size=1), stored(PROMPT))

    assert (cached(index, PROMPT), len(index)) == (6, 4)


def test_an_event_that_may_remove_and_cannot_be_read_is_an_error():
    """The connection ends, and with it all that is known of the engine."""
    with pytest.raises(BadKvEvents):
        send(following(), {"type": "BlockRemoved", "block_hashes": [None]})


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_a_hit_ends_where_a_window_or_a_state_does(kind):
    """The other groups are of no use without what those layers had at that place."""
    index = following()
    needs = {WINDOW: 2, STATE: 1}[kind]
    more = {"kv_cache_spec_sliding_window": 4} if kind == WINDOW else {}
    send(index, stored(PROMPT))
    ends = names(PROMPT)
    # Only some of the group's blocks are cached; the tokens are those of all (``cache_full_blocks``).
    send(index, stored(PROMPT, group=1, kind=kind, **more) | {"block_hashes": ends[1:3]})
    assert cached(index, [*PROMPT, 9]) == 6
    send(index, removed(ends[2], group=1))
    assert cached(index, [*PROMPT, 9]) == (4 if needs == 1 else 0)
    send(index, removed(ends[1], group=1))
    assert cached(index, [*PROMPT, 9]) == 0


def announced(group, kind, size=SIZE, window=None):
    """What a rank's state begins with: the event of a group that stores nothing."""
    nothing = {"block_hashes": [], "parent_block_hash": None, "token_ids": []}
    return stored([], group=group, kind=kind, size=size) | nothing | {"kv_cache_spec_sliding_window": window}


@pytest.mark.parametrize(("kind", "window"), [(WINDOW, 4), (STATE, None)])
def test_a_group_that_is_announced_counts_before_its_first_block(kind, window):
    """Or a hit would be too long until then."""
    index = following()
    send(index, CLEARED, announced(0, FULL), announced(1, kind, window=window))
    send(index, stored(PROMPT))
    assert (cached(index, [*PROMPT, 9]), len(index)) == (0, 4)
    send(index, stored(PROMPT, group=1, kind=kind, kv_cache_spec_sliding_window=window))
    assert cached(index, [*PROMPT, 9]) == 8
    send(index, CLEARED)
    send(index, stored(PROMPT))
    assert cached(index, [*PROMPT, 9]) == 0  # it is still known


def test_a_group_of_an_unknown_kind_is_known_when_it_is_announced():
    """The router keeps to what it has sent from the beginning; groups that no prefix needs do not matter."""
    index = following()
    send(index, announced(0, FULL), announced(1, "encoder_only_attention"), stored(PROMPT))
    assert cached(index, PROMPT) == 6
    send(index, announced(2, "chunked_local_attention"))
    assert cached(index, PROMPT) is None


def test_an_announced_size_is_that_of_whole_blocks():
    """Parts of them that are told of do not count, and nothing counts as stored."""
    index = following()
    send(index, announced(0, FULL, size=4), stored(PROMPT))
    assert (cached(index, [*PROMPT, 9]), index.take_counts(D0).stored) == (0, 0)
    send(index, stored(PROMPT, size=4))
    assert cached(index, [*PROMPT, 9]) == 8


def beginning(index, ids, count, name=D0):
    held = index.beginning(name, TokenPrompt(ids), count, None)
    return held and (held.tokens, held.beyond, held.is_whole)


def test_of_a_known_beginning_whole_blocks_are_looked_up_and_those_behind_are_counted():
    """What follows may be of this prompt: it is an upper bound."""
    index = following()
    assert beginning(index, PROMPT, 4) == (0, 0, False)
    send(index, stored(PROMPT))

    assert beginning(index, PROMPT, 1) is None  # less than a block says nothing
    assert beginning(index, PROMPT, 5) == (4, 4, True)
    assert beginning(index, PROMPT, 8) == (8, 0, True)
    assert beginning(index, [1, 2, 9, 9, 9], 5) == (2, 0, False)
    send(index, removed(names(PROMPT)[3]))
    assert beginning(index, PROMPT, 5) == (4, 2, True)
    send(index, removed(names(PROMPT)[1]))
    assert beginning(index, PROMPT, 5) == (2, 0, False)
    assert beginning(index, PROMPT, 5, D1) is None


def test_the_beginning_for_an_adapter_is_that_of_its_blocks():
    """And with a salt that of its salted ones."""
    index = following()
    send(index, stored(PROMPT, lora_name="fr", extra_keys=[("fr", "s"), ("fr",), ("fr",), ("fr",)]))
    salted = TokenPrompt(PROMPT, "s")

    assert index.beginning(D0, salted, 4, "fr").tokens == 4
    assert index.beginning(D0, salted, 4, None).tokens == 0
    assert index.beginning(D0, TokenPrompt(PROMPT), 4, "fr").tokens == 0


def test_the_latest_of_several_continuations_counts():
    """A client may ask the same again; the earlier answer is of no use."""
    index = following()
    send(index, stored(PROMPT), stored([*PROMPT[:4], 9, 9], start=2))

    assert beginning(index, PROMPT, 4) == (4, 2, True)


def test_ranks_and_groups_have_the_beginning_that_all_have():
    """An instance of several ranks chooses among them itself; a window's blocks are needed behind the beginning."""
    index = following(ranks=(0, 1))
    send(index, stored(PROMPT), stored(PROMPT, group=1, kind=WINDOW, kv_cache_spec_sliding_window=4), rank=0)
    assert beginning(index, PROMPT, 8) == (0, 0, False)
    send(index, stored(PROMPT[:6]), rank=1)
    assert beginning(index, PROMPT, 4) == (4, 2, True)
    send(index, announced(2, "chunked_local_attention"), rank=1)
    assert beginning(index, PROMPT, 4) is None


def test_of_groups_of_an_unknown_kind_nothing_is_said():
    """The router keeps to what it has sent; groups that no prefix needs do not matter."""
    index = following()
    send(index, stored(PROMPT), stored(PROMPT, group=1, kind="cross_attention"))
    assert cached(index, PROMPT) == 6
    send(index, stored(PROMPT, group=2, kind="chunked_local_attention"))
    assert cached(index, PROMPT) is None
    send(index, CLEARED)
    assert cached(index, PROMPT) is None


def test_an_engine_with_too_many_blocks_is_dropped_whole():
    """Half an index would say that what is left out is not there; the others stay."""
    index = CacheIndex(most=10, engine_most=6)
    for engine in (D0, D1):
        index.open(engine, {engine: None})
        send(index, stored(PROMPT), engine=engine)
        send(index, engine=engine)
    send(index, stored([9, *PROMPT]))
    assert (index.is_dropped(D0), index.is_dropped(D1), len(index)) == (True, False, 4)
    assert (cached(index, PROMPT), cached(index, PROMPT, D1)) == (None, 6)
    send(index, stored(PROMPT))
    assert (len(index), index.blocks(D0)) == (4, 0)
    index.open(D0, {D0: None})
    send(index, stored(PROMPT))
    send(index)
    assert cached(index, PROMPT) == 6


def test_an_engine_with_too_many_ranks_is_dropped():
    """No engine has so many, and each has its tables."""
    index = following(ranks=range(RANKS_MOST))
    assert not index.is_dropped(D0)
    send(index, rank=RANKS_MOST)
    assert index.is_dropped(D0)


def test_long_events_are_applied_in_steps():
    """Requests are served between them."""
    index = following()
    ids = list(range(4000))

    assert send(index, stored(ids)) > 6
    assert cached(index, ids) == 3998
    assert send(index, *(removed(name) for name in names(ids))) > 6
    assert len(index) == 0


class Engine(RuleBasedStateMachine):
    """An engine with equal blocks, evictions anywhere, restarts, and batches that are lost on their way."""

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed):
        self.dice = random.Random(seed)
        self.index = CacheIndex(most=60, engine_most=40)
        self.held = Counter()
        self.whole = False
        self.connect()

    @rule()
    def connect(self):
        """After a restart, a gap, or a cut: the state anew, in an order in which parents come first."""
        self.index.forget(D0)
        assert len(self.index) == 0
        assert cached(self.index, [0] * 9) is None
        self.index.open(D0, {D0: None})
        send(self.index, CLEARED)
        for ids in sorted(self.held, key=len):
            if self.dice.random() < 0.9:  # its parent may be gone, or the engine does not know it any more
                for _ in range(self.held[ids]):
                    send(self.index, stored(list(ids), start=len(ids) // SIZE - 1))
        send(self.index)

    @rule(length=st.integers(1, 6), seed=st.integers(0, 50))
    def turn(self, length, seed):
        """A prompt of few different tokens is computed, behind what is cached of it."""
        dice = random.Random(seed)
        ids = tuple(dice.randrange(2) for _ in range(length * SIZE))
        hit = self.hit(ids) // SIZE if dice.random() < 0.8 else 0
        send(self.index, stored(list(ids), start=hit))
        self.held.update(ids[: (place + 1) * SIZE] for place in range(hit, length))

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        for _ in range(min(count, len(self.held))):
            gone = self.dice.choice(sorted(self.held))
            self.held[gone] -= 1
            self.held += Counter()
            send(self.index, removed(names(list(gone))[-1]))

    @rule()
    def reset(self):
        self.held.clear()
        send(self.index, CLEARED)

    @rule()
    def restart(self):
        self.held.clear()
        self.connect()

    @rule()
    def lose(self):
        """The engine's plugin has missed something, and forgets what it knows: poorer, and never wrong."""
        send(self.index, CLEARED)

    def hit(self, ids):
        place = 0
        while place < len(ids) and self.held[tuple(ids[: place + SIZE])]:
            place += SIZE
        return place

    @invariant()
    def the_index_never_says_more_than_the_engine_has(self):
        for _ in range(10):
            ids = [self.dice.randrange(2) for _ in range(13)]
            known = cached(self.index, ids)
            assert known is None or known <= self.hit(ids)
            held = self.index.beginning(D0, TokenPrompt(ids), 8, None)
            assert held is None or held.tokens <= self.hit(ids)
            assert held is None or held.is_whole == (held.tokens == 8)
            assert held is None or held.tokens + held.beyond <= max((len(one) for one in self.held), default=0)

    @invariant()
    def memory_is_bounded(self):
        assert len(self.index) == self.index.blocks(D0) <= 40


Engine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestEngine = Engine.TestCase


def test_each_step_that_may_change_what_is_there_is_counted():
    """What was found between two steps of a long event is remembered only until the next one."""
    index = following()
    ids = [*range(2000)]
    event = read_batch(msgspec.msgpack.encode([0.0, [stored(ids), removed(*names(ids))], 0]))
    seen = [(index.changes.count, cached(index, ids))]

    for _ in index.apply(D0, event):
        seen.append((index.changes.count, cached(index, ids)))
    seen.append((index.changes.count, cached(index, ids)))
    index.open(D0, {D0: None})
    seen.append((index.changes.count, cached(index, ids)))
    send(index, CLEARED)
    seen.append((index.changes.count, cached(index, ids)))
    send(index)
    seen.append((index.changes.count, cached(index, ids)))
    index.forget(D0)
    seen.append((index.changes.count, cached(index, ids)))

    assert len({had for _, had in seen}) > 3
    assert len({changes for changes, _ in seen}) == len(set(seen))  # at one number it is always the same
