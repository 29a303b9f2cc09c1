"""The computed blocks that P's workers receive with each step, from vLLM's own counters."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.push_progress import PushProgress

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.push.push_job import TransferOver

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE = 4
T = RequestId("t")


class Engine:
    """vLLM's scheduler, as far as the streams notice it: a step's tokens count after the step was announced."""

    def __init__(self, *groups):
        self.streams = PushProgress(groups or [CacheGroup(SIZE)])
        self.tables = {}
        self.running = set()

    def begin(self, name="t", tokens=10):
        request = SimpleNamespace(
            request_id=f"p-{name}", num_prompt_tokens=tokens, num_computed_tokens=0, num_preemptions=0
        )
        self.streams.begin(request, RequestId(name), "digest")
        return request

    def finished(self, request):
        """Return the last piece of a prompt."""
        self.streams.finish(request, [[7, 8, 9] for _ in self.streams._groups])
        return self.step_of_all_groups()[-1]

    def step(self, *scheduled, state=True, resumed=(), **others):
        """Schedule (request, tokens, block table of the one group) and return the pieces for the workers."""
        of_one = [(request, count, (blocks,)) for request, count, blocks in scheduled]
        news = self.step_of_all_groups(*of_one, state=state, resumed=resumed, **others)
        return [
            ("gone", each.request) if isinstance(each, TransferOver) else
            (each.request, each.attempt, list(*each.groups), each.last) for each in news
        ]  # fmt: skip

    def step_of_all_groups(self, *scheduled, state=True, resumed=(), loads=False, copies=()):
        """Schedule (request, tokens, block tables); ``loads``, ``copies``: what else writes KV in this step."""
        for request, _, blocks in scheduled:
            self.tables[request.request_id] = blocks
        tokens = {request.request_id: count for request, count, _ in scheduled}
        block_state = SimpleNamespace(resolve_block_ids=lambda own: self.tables[own]) if state else None
        known = {request.request_id: request.num_computed_tokens for request, *_ in scheduled}
        new = tokens.keys() - self.running - set(resumed)
        cached = [own for own in tokens if own not in new]
        self.running |= tokens.keys()
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            kv_connector_block_state=block_state,
            scheduled_new_reqs=[SimpleNamespace(req_id=own, num_computed_tokens=known[own]) for own in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[known[own] for own in cached], resumed_req_ids=set(resumed)
            ),
            has_sync_kv_loads=loads,
            kv_cache_block_copies=list(copies) or None,
        )
        news = self.streams.take_computed(output)
        for request, count, _ in scheduled:
            request.num_computed_tokens += count
        return news


@pytest.fixture
def engine():
    return Engine()


def test_the_workers_hear_of_which_groups_they_must_write_all(engine):
    """VLLM zeroes the blocks of these groups, unless they are filled: the decode engine fills them by our writes."""
    assert engine.finished(engine.begin()).zeroed == frozenset()
    engine = Engine(CacheGroup(SIZE), CacheGroup(SIZE, is_zeroed=True))

    assert engine.finished(engine.begin()).zeroed == {1}


def test_a_step_tells_what_the_steps_before_have_completed(engine):
    """Whole blocks only: a later token still goes into the last one."""
    request = engine.begin()
    assert engine.step((request, 6, [7, 8])) == []
    assert engine.step((request, 2, [7, 8])) == [(T, 0, [7], False)]
    assert engine.step((request, 2, [7, 8, 9])) == [(T, 0, [8], False)]
    engine.streams.finish(request, ([7, 8, 9],))
    assert engine.streams.has_pending()
    assert engine.step() == [(T, 0, [9], True)]

    assert not engine.streams.has_pending()
    assert engine.step() == []
    assert len(engine.streams) == 0


def test_prefix_cache_hits_are_announced_before_the_rest_is_computed(engine):
    """In the first step of the request: a decode engine gets them while the prefill engine computes."""
    request = engine.begin(tokens=12)
    request.num_computed_tokens = 8
    assert engine.step((request, 4, [7, 8, 9])) == [(T, 0, [7, 8], False)]
    engine.streams.finish(request, ([7, 8, 9],))
    assert engine.step() == [(T, 0, [9], True)]


def test_hits_of_what_the_same_step_computes_are_announced_a_step_later(engine):
    """VLLM counts a block as cached when it is scheduled. What lies before it, and is older, goes at once."""
    first, second = engine.begin("a", tokens=16), engine.begin("b", tokens=16)
    first.num_computed_tokens = 4
    second.num_computed_tokens = 12  # of these, the first one computes 8 now
    told = engine.step((first, 8, [6, 7, 8]), (second, 2, [6, 7, 8, 9]))
    assert sorted(told) == [("a", 0, [6], False), ("b", 0, [6], False)]
    assert ("b", 0, [7, 8], False) in engine.step((second, 2, [6, 7, 8, 9]))


def test_hits_of_what_a_foreign_request_computes_wait_too(engine):
    """Whoever computes it: an old request of another client, in the middle of its prompt."""
    foreign = SimpleNamespace(request_id="x", num_computed_tokens=4, num_prompt_tokens=10, num_preemptions=0)
    engine.step((foreign, 4, [5, 6]))
    request = engine.begin(tokens=16)
    request.num_computed_tokens = 12
    assert engine.step((foreign, 2, [5, 6, 7]), (request, 4, [5, 6, 7, 8])) == [(T, 0, [5, 6], False)]


@pytest.mark.parametrize("others", [{"loads": True}, {"copies": [(3, 7)]}])
def test_hits_wait_in_a_step_that_loads_or_copies(engine, others):
    """Nobody knows which of the hits another connector's load, or a copy of a shared block, is still to fill."""
    request = engine.begin(tokens=12)
    request.num_computed_tokens = 8
    assert engine.step((request, 2, [7, 8, 9]), **others) == []
    assert engine.step((request, 2, [7, 8, 9])) == [(T, 0, [7, 8], False)]


def test_hits_of_a_preempted_request_are_announced_as_those_of_a_new_one(engine):
    """When it comes back it hits what is cached; its blocks may be others."""
    first, second = engine.begin("a", tokens=12), engine.begin("b", tokens=12)
    engine.step((first, 4, [7]))
    first.num_preemptions, first.num_computed_tokens = 1, 4
    assert engine.step((second, 4, [5]), (first, 4, [5, 6]), resumed={"p-a"}) == []
    assert ("a", 1, [5, 6], False) in engine.step((first, 4, [5, 6, 7]))


@pytest.mark.parametrize("chunk", range(1, 11))
@pytest.mark.parametrize("hits", [0, 4, 8])
def test_every_block_is_announced_once_and_in_order(engine, chunk, hits):
    """Whatever the chunks; blocks of the local prefix cache come first."""
    request = engine.begin()
    table = [7, 8, 9]
    told = []
    request.num_computed_tokens = hits
    while request.num_computed_tokens < 10:
        told += engine.step((request, min(chunk, 10 - request.num_computed_tokens), table))
        assert sum(len(blocks) for _, _, blocks, _ in told) <= request.num_computed_tokens // SIZE
    engine.streams.finish(request, (table,))
    told += engine.step()

    assert [block for _, _, blocks, _ in told for block in blocks] == table
    assert [last for *_, last in told] == [False] * (len(told) - 1) + [True]


def test_a_prompt_that_ends_with_a_block(engine):
    """The last piece may be empty, and still ends the prefill."""
    request = engine.begin(tokens=8)
    engine.step((request, 8, [7, 8]))
    assert engine.step((request, 1, [7, 8, 9])) == [(T, 0, [7, 8], False)]
    engine.streams.finish(request, ([7, 8],))

    assert engine.step() == [(T, 0, [], True)]


def test_blocks_of_the_output_are_not_announced(engine):
    """More than one token may be computed on P; the prompt's blocks are all there is to write."""
    request = engine.begin(tokens=4)
    engine.step((request, 4, [7]))
    engine.step((request, 1, [7, 8]))
    for _ in range(5):
        assert engine.step((request, 1, [7, 8, 9])) == []


def test_after_a_preemption_all_blocks_are_announced_again(engine):
    """In other blocks, and as another attempt."""
    request = engine.begin()
    engine.step((request, 8, [7, 8]))
    assert engine.step((request, 1, [7, 8, 9])) == [(T, 0, [7, 8], False)]
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert engine.step() == []
    assert engine.step((request, 8, [3, 4])) == []
    assert engine.step((request, 2, [3, 4, 5])) == [(T, 1, [3, 4], False)]
    engine.streams.finish(request, ([3, 4, 5],))

    assert engine.step() == [(T, 1, [5], True)]


def test_a_preemption_that_finds_its_blocks_cached_tells_them_again_too(engine):
    """They were another's for a while, as far as anybody knows."""
    request = engine.begin()
    engine.step((request, 8, [7, 8]))
    engine.step((request, 1, [7, 8, 9]))
    request.num_preemptions, request.num_computed_tokens = 1, 8
    engine.streams.finish(request, ([7, 8, 9],))

    assert engine.step() == [(T, 1, [7, 8, 9], True)]


def test_without_block_tables_all_blocks_are_announced_at_the_end(engine):
    """vLLM gives them to producers only."""
    request = engine.begin()
    engine.step((request, 8, [7, 8]), state=False)
    assert engine.step((request, 2, [7, 8, 9]), state=False) == []
    engine.streams.finish(request, ([7, 8, 9],))

    assert engine.step(state=False) == [(T, 0, [7, 8, 9], True)]


def test_other_requests_are_not_announced(engine):
    """A step announces only requests that it schedules and that a decode engine waits for."""
    ours, other = engine.begin(), engine.begin("u")
    foreign = SimpleNamespace(request_id="x", num_computed_tokens=8, num_prompt_tokens=10, num_preemptions=0)
    engine.step((ours, 8, [1, 2]), (other, 8, [3, 4]), (foreign, 1, [5, 6]))

    assert engine.step((other, 1, [3, 4, 9]), (foreign, 1, [5, 6])) == [("u", 0, [3, 4], False)]


def test_an_abandoned_prefill_tells_nothing_more(engine):
    """Twice is as good as once."""
    request = engine.begin()
    assert T in engine.streams
    assert engine.streams.name_of(request) == T
    engine.step((request, 8, [7, 8]))
    engine.streams.abandon(request)
    engine.streams.abandon(request)

    assert engine.step((request, 2, [7, 8, 9])) == [("gone", T)]
    assert T not in engine.streams
    assert engine.streams.name_of(request) is None


def test_hits_of_groups_go_as_far_as_all_of_them_are_computed():
    """One block of one group that is computed now: the tokens from there on wait in every group."""
    engine = Engine(CacheGroup(4), CacheGroup(2))
    request = engine.begin(tokens=12)
    request.num_computed_tokens = 8
    foreign = SimpleNamespace(request_id="x", num_computed_tokens=2)
    (piece,) = engine.step_of_all_groups((foreign, 2, ([5], [1, 2])), (request, 4, ([7, 8, 9], [3, 4, 2, 6, 0, 0])))

    assert (piece.groups, piece.tokens) == ([[7], [3, 4]], 4)


def test_each_group_announces_its_own_complete_blocks():
    """Groups may have blocks of different sizes; a block that fell out of a window keeps its place, as 0."""
    engine = Engine(CacheGroup(4), CacheGroup(2, window=3))
    request = engine.begin()
    assert engine.step_of_all_groups((request, 6, ([7, 8], [1, 2, 3]))) == []
    (first,) = engine.step_of_all_groups((request, 3, ([7, 8, 9], [0, 2, 3, 4, 5])))
    (second,) = engine.step_of_all_groups((request, 1, ([7, 8, 9], [0, 0, 0, 4, 5])))
    engine.streams.finish(request, ([7, 8, 9], [0, 0, 0, 4, 5]))
    (third,) = engine.step_of_all_groups()

    assert (first.groups, first.tokens, first.last) == ([[7], [0, 2, 3]], 6, False)
    assert (second.groups, second.tokens, second.last) == ([[8], [4]], 9, False)
    assert (third.groups, third.tokens, third.last) == ([[9], [5]], 10, True)
