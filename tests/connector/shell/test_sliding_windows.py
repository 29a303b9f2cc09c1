"""Blocks of sliding windows, with vLLM's real block pool: pinned while they may still be needed, and not longer."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.block_pool import BlockPool

    from pdrelay_connector.shell.sliding_windows import NULL, SlidingWindowPins

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS = 4, 40
FULL = CacheGroup(SIZE)
WINDOW = CacheGroup(SIZE, window=6)
CHUNK = CacheGroup(SIZE, chunk=8)


class Engine:
    """vLLM's scheduler, as far as the windows notice it: tables of every group, and blocks that fall out of them."""

    def __init__(self, *groups):
        self.groups = groups or (FULL, WINDOW)
        self.pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=SIZE)
        self.windows = SlidingWindowPins(self.groups, lambda: self.pool)
        self.live, self.tables = {}, {}

    def begin(self, tokens, *, own="p-a", **params):
        request = SimpleNamespace(
            request_id=own, num_prompt_tokens=tokens, num_computed_tokens=0, num_preemptions=0,
            kv_transfer_params=params or None,
        )  # fmt: skip
        self.live[own] = request
        self.tables[own] = [[] for _ in self.groups]
        return request

    def step(self, request, scheduled):
        """Drop what the next token does not see any more, allocate, announce the step, then count its tokens."""
        self.slide(request)
        after = request.num_computed_tokens + scheduled
        for table in self.tables[request.request_id]:
            table += self.pool.get_new_blocks(-(-after // SIZE) - len(table))
        ids = {own: self.ids(own) for own in self.tables}
        state = SimpleNamespace(resolve_block_ids=lambda own: ids[own])
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: scheduled}, kv_connector_block_state=state)
        self.windows.step(output, self.live)
        request.num_computed_tokens = after

    def slide(self, request):
        for group, table in zip(self.groups, self.tables[request.request_id], strict=True):
            for number in range(min(group.first_needed(request.num_computed_tokens) // SIZE, len(table))):
                if not table[number].is_null:
                    self.pool.free_blocks([table[number]])
                    table[number] = self.pool.null_block

    def ids(self, own):
        return tuple([block.block_id for block in table] for table in self.tables[own])

    def finish(self, request):
        """As vLLM does: slide, call request_finished, free. Return our blocks and vLLM's."""
        self.slide(request)
        own = request.request_id
        held = self.ids(own)
        lent = self.windows.restore(own, held)
        kept = [self.pool.blocks[block] for table in lent for block in table if block != NULL]
        self.pool.touch(kept)
        self.windows.release(own)
        for table in self.tables.pop(own):
            self.pool.free_blocks([block for block in table if not block.is_null])
        del self.live[own]
        return lent, held, kept

    @property
    def free(self):
        return self.pool.get_num_free_blocks()


def held(group, table, prompt):
    """Whether all blocks of the tokens that a decode engine needs are there."""
    start, stop = group.missing_tokens(prompt, prompt - 1)
    return all(table[group.blocks_of(start, stop)])


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("group", [WINDOW, CHUNK, CacheGroup(SIZE, window=2), CacheGroup(SIZE, window=9)], ids=str)
def test_every_block_that_a_decode_engine_needs_is_lent(chunk, group):
    """Whatever the length of the prompt, and wherever its steps end; it needs the window before the last token."""
    engine = Engine(FULL, group)
    missed = 0
    for prompt in range(2, 35):
        request = engine.begin(prompt, do_remote_decode=True)
        while request.num_computed_tokens < prompt:
            engine.step(request, min(chunk, prompt - request.num_computed_tokens))
        lent, by_vllm, kept = engine.finish(request)

        assert held(FULL, lent[0], prompt)
        assert held(group, lent[1], prompt)
        missed += not held(group, by_vllm[1], prompt)
        engine.pool.free_blocks(kept)
        assert engine.free == BLOCKS - 1
        assert len(engine.windows) == 0
    assert missed, "vLLM keeps them by itself: this module is not needed any more"


def test_nothing_is_pinned_where_all_layers_see_everything():
    """Their blocks are all there at the end."""
    engine = Engine(FULL)
    engine.step(engine.begin(9, do_remote_decode=True), 9)

    assert len(engine.windows) == 0


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": True}], ids=["an ordinary one", "one that was loaded"])
def test_only_prefills_for_others_are_pinned(params):
    """Other requests are not handed over."""
    engine = Engine()
    engine.step(engine.begin(9, **params), 9)

    assert len(engine.windows) == 0


def test_nothing_is_pinned_before_the_last_step_of_a_prompt():
    """Blocks outside an earlier step's window are not needed."""
    engine = Engine()
    request = engine.begin(30, do_remote_decode=True)
    engine.step(request, 29)
    assert len(engine.windows) == 0
    engine.step(request, 1)

    assert len(engine.windows) == 1


def test_a_request_that_is_computed_further_keeps_the_window_of_its_prompt():
    """A prefill of more than one token: the answer's window has left the prompt's behind."""
    engine = Engine()
    request = engine.begin(17, do_remote_decode=True)
    engine.step(request, 17)
    for _ in range(12):
        engine.step(request, 1)
    lent, _, kept = engine.finish(request)

    assert held(WINDOW, lent[1], 17)
    engine.pool.free_blocks(kept)
    assert engine.free == BLOCKS - 1


def test_a_preempted_attempt_gives_its_pins_back():
    """Its blocks are void; the next one's are pinned instead."""
    engine = Engine()
    request = engine.begin(17, do_remote_decode=True)
    engine.step(request, 17)
    for table in engine.tables["p-a"]:
        engine.pool.free_blocks([block for block in table if not block.is_null])
    engine.tables["p-a"] = [[], []]
    request.num_computed_tokens, request.num_preemptions = 0, 1
    engine.step(request, 17)
    lent, _, kept = engine.finish(request)

    assert held(WINDOW, lent[1], 17)
    engine.pool.free_blocks(kept)
    assert engine.free == BLOCKS - 1


def test_without_block_tables_nothing_is_pinned():
    """vLLM gives them to producers only."""
    engine = Engine()
    request = engine.begin(9, do_remote_decode=True)
    engine.windows.step(
        SimpleNamespace(num_scheduled_tokens={"p-a": 9}, kv_connector_block_state=None), {"p-a": request}
    )

    assert engine.windows.restore("p-a", ([1, 2, 3], [0, 2, 3])) == [[1, 2, 3], [0, 2, 3]]


def test_releasing_what_was_never_pinned_is_nothing():
    """Every request ends there."""
    engine = Engine()
    engine.windows.release("p-a")

    assert engine.free == BLOCKS - 1
