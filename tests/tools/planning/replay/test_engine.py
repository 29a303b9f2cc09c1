"""The simulated engine, against sums done by hand and rules that any engine keeps."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.engine import EventLoop, VirtualEngine, VirtualLeg
from pdrelay_tools.planning.replay.kv_cache import KvCache
from support.searching import examples

MODEL = EngineModel(
    step_s=1.0,
    prefill_token_s=0.01,
    prefill_context_s=0.0,
    decode_request_s=0.1,
    decode_context_s=0.001,
    leg_s=0.0,
    max_num_batched_tokens=100,
    max_num_seqs=2,
    kv_tokens=1000,
    kv_bytes_per_token=10.0,
    link_bytes_per_s=1000.0,
    link_s=0.5,
)


class Bench:
    """One loop, engines, and the times at which legs begin to answer and end."""

    def __init__(self, model=MODEL, block_tokens=10):
        self.loop = EventLoop()
        self.model = model
        self.block_tokens = block_tokens
        self.engine = self.another()
        self.first, self.ended = {}, {}

    def another(self):
        return VirtualEngine(self.model, self.block_tokens, self.loop)

    def leg(self, name, blocks, prompt, output, **more):
        events = {
            "first": lambda: self.first.update({name: self.loop.now}),
            "ended": lambda _: self.ended.update({name: self.loop.now}),
        }
        return VirtualLeg(blocks, prompt, output, **(events | more))


def test_one_request_by_hand():
    """A step of 1 s and 50 tokens of 10 ms; then two steps of one token each, with 51 and 52 tokens before them."""
    bench = Bench()
    bench.engine.add(bench.leg("a", range(5), 50, 3))
    bench.loop.run()

    assert bench.first["a"] == pytest.approx(1.5)
    assert bench.ended["a"] == pytest.approx(1.5 + 1.1 + 0.051 + 1.1 + 0.052)
    assert bench.engine.log.gaps == [(pytest.approx(1.151), 1), (pytest.approx(1.152), 1)]
    assert bench.engine.log.busy_s == pytest.approx(bench.ended["a"])


def test_a_long_prompt_takes_several_steps():
    """250 tokens are 100, 100 and 50."""
    bench = Bench()
    bench.engine.add(bench.leg("a", range(25), 250, 1))
    bench.loop.run()

    assert bench.first["a"] == bench.ended["a"] == pytest.approx(3 + 2.5)


def test_running_answers_get_their_token_before_prompts():
    """The budget of a step is 100 tokens: one of them is of the answer, so the prompt of 100 needs two steps more."""
    bench = Bench()
    bench.engine.add(bench.leg("a", range(1), 10, 4))
    bench.loop.after(0.5, lambda: bench.engine.add(bench.leg("b", range(10, 20), 100, 1)))
    bench.loop.run()

    assert bench.first["a"] == pytest.approx(1.1)
    longer = 1.1 + 1 + 0.1 + 0.011 + 99 * 0.01  # the step with 99 tokens of b
    assert bench.first["b"] == pytest.approx(longer + 1 + 0.1 + 0.012 + 0.01)
    assert bench.engine.log.gaps[0][0] == pytest.approx(longer - 1.1)


def test_attention_costs_more_the_more_is_before():
    """Of a chunk of 100 tokens after 100, the mean token has 150 before it."""
    assert EngineModel(prefill_token_s=0, prefill_context_s=0.001).chunk_s(100, 100) == pytest.approx(100 * 150 * 0.001)


def test_a_cached_prompt_computes_its_last_block_only():
    """As vLLM: the last token is always computed, so a prompt that ends with a block computes that block."""
    bench = Bench()
    first, second = bench.leg("a", range(5), 50, 1), bench.leg("b", range(5), 50, 1)
    bench.engine.add(first)
    bench.loop.run()
    bench.engine.add(second)
    bench.loop.run()

    assert (first.computed_tokens, second.computed_tokens, second.cached_tokens) == (50, 10, 40)


def test_the_next_turn_finds_the_answer():
    """An engine that generated an answer has its blocks."""
    bench = Bench()
    bench.engine.add(bench.leg("a", range(2), 20, 20, answer=range(2, 4)))
    bench.loop.run()
    later = bench.leg("b", range(5), 55, 1)
    bench.engine.add(later)
    bench.loop.run()

    assert later.cached_tokens == 40


def test_at_most_max_num_seqs_run():
    """The third waits for the end of the first."""
    bench = Bench()
    for name in "abc":
        bench.engine.add(bench.leg(name, (), 5, 3))
    bench.loop.run()

    assert bench.first["b"] < bench.ended["a"] < bench.first["c"]


def test_without_room_a_request_waits():
    """600 and 600 of 1,000 tokens."""
    bench = Bench()
    bench.engine.add(bench.leg("a", range(50), 500, 100))
    bench.engine.add(bench.leg("b", range(50, 100), 500, 100))
    bench.loop.run()

    assert bench.first["b"] > bench.ended["a"]
    assert bench.engine.kv_use == 0


def test_a_transfer_by_hand():
    """D has nothing: 50 tokens of 10 bytes are half a second and half a second; D computes one token."""
    bench = Bench()
    other = bench.another()
    lent = bench.leg("p", range(5), 50, 1, holds_blocks=True)
    other.add(lent)
    bench.loop.run()
    assert other.kv_use == pytest.approx(0.06)

    leg = bench.leg("d", range(5), 50, 1, source=(other, lent))
    bench.engine.add(leg)
    bench.loop.run()

    assert bench.first["d"] - bench.first["p"] == pytest.approx(0.5 + 0.5 + 1 + 0.01)
    assert (leg.cached_tokens, leg.computed_tokens) == (0, 1)
    assert other.kv_use == bench.engine.kv_use == 0


def test_a_link_carries_one_transfer_after_the_other():
    """Two engines that read from one at once: the second waits for the first."""
    bench = Bench()
    other, third = bench.another(), bench.another()
    lent = [
        bench.leg(name, blocks, 50, 1, holds_blocks=True) for name, blocks in (("p", range(5)), ("q", range(5, 10)))
    ]
    for leg in lent:
        other.add(leg)
    bench.loop.run()
    began = bench.loop.now
    bench.engine.add(bench.leg("d", range(5), 50, 1, source=(other, lent[0])))
    third.add(bench.leg("e", range(5, 10), 50, 1, source=(other, lent[1])))
    bench.loop.run()

    assert (bench.first["d"] - began, bench.first["e"] - began) == (pytest.approx(2.01), pytest.approx(3.01))


def test_an_api_server_does_one_thing_after_the_other():
    """Two requests of 2 s each, before the engine has them; and 0.1 s for each token that clients get."""
    bench = Bench(msgspec.structs.replace(MODEL, api_request_s=2.0, api_prompt_token_s=0.01, api_token_s=0.1))
    for name in "ab":
        bench.engine.send(bench.leg(name, (), 10, 2))
    bench.loop.run()

    assert bench.first["a"] == pytest.approx(4.2 + 0.1)  # its step is over at 3.2, and b's request is worked on
    assert bench.first["b"] == pytest.approx(4.311 + 1.1 + 0.1)  # behind the step of a's second token
    assert [gap for gap, _ in bench.engine.log.gaps] == pytest.approx([4.311 + 0.1 - 4.3, 1.111])


def test_each_prompt_of_a_step_has_a_price_of_its_own():
    """Two of 10 tokens take 0.5 s more than one of 20."""
    model = msgspec.structs.replace(MODEL, prefill_request_s=0.5)
    one, two = Bench(model), Bench(model)
    one.engine.add(one.leg("a", (), 20, 1))
    for name in "ab":
        two.loop.after(0.0, lambda name=name: two.engine.waiting.append(two.leg(name, (), 10, 1)))
    two.loop.after(0.0, two.engine._wake)
    one.loop.run()
    two.loop.run()

    assert two.ended["b"] - one.ended["a"] == pytest.approx(0.5)


def test_jitter_spreads_steps_around_the_same_mean_and_is_the_same_each_time():
    """Or a fit could not tell a slow engine from an uneven one."""
    lengths = []
    for _ in range(2):
        bench = Bench(msgspec.structs.replace(MODEL, jitter=0.5, decode_context_s=0.0))
        bench.engine.add(bench.leg("a", (), 5, 900))
        bench.loop.run()
        lengths.append([gap for gap, _ in bench.engine.log.gaps])

    assert lengths[0] == lengths[1]
    assert sum(lengths[0]) / len(lengths[0]) == pytest.approx(1.1, rel=0.06)
    assert max(lengths[0]) > 2.2


class Published:
    """The events of a cache."""

    def __init__(self):
        self.there = set()
        self.chain = {}

    def stored(self, name, before):
        assert name not in self.there
        assert before is None or before in self.chain
        self.there.add(name)
        self.chain[name] = before

    def removed(self, name):
        self.there.remove(name)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30
    )
)
def test_events_tell_all_that_is_in_a_cache(requests):
    """Whatever is taken and given back: a name is there if it was stored and not removed."""
    events = Published()
    running = []
    cache = KvCache(12, events)
    for chat, size, answer, ends in requests:
        names = range(100 * chat, 100 * chat + size)
        if cache.use_blocks(names, answer):
            running.append((names, answer, range(100 * chat + size, 100 * chat + size + answer)))
        for _ in range(min(ends, len(running))):
            cache.release_blocks(*running.pop(0))
        for name in (100 * each + place for each in range(3) for place in range(9)):
            assert (cache.count_cached([name]) == 1) == (name in events.there)


def test_the_oldest_content_goes_first_and_ends_before_beginnings():
    """Four blocks, two of each of two prompts; a third prompt of one block takes the end of the older."""
    cache = KvCache(4)
    for names in ((1, 2), (3, 4)):
        cache.use_blocks(names, 0)
        cache.release_blocks(names, 0)
    cache.use_blocks((5,), 0)

    assert (cache.count_cached((1, 2)), cache.count_cached((3, 4)), cache.used) == (1, 2, 1)


def test_what_is_in_use_is_not_evicted():
    """Nor is more taken than there is."""
    cache = KvCache(3)

    assert cache.use_blocks((1, 2), 0)
    assert not cache.use_blocks((3, 4), 0)
    assert cache.use_blocks((1, 2), 1)
    assert cache.used == 3
    assert not cache.use_blocks((), 1)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 3), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=25
    )
)
def test_every_leg_ends_once_and_everything_is_given_back(legs):
    """Whatever comes when: each answers and then ends, the blocks add up, and the busy time has all the work in it."""
    bench = Bench()
    counts = {}
    for number, (at_s, prefix, prompt, output) in enumerate(legs):
        names = [*range(min(prefix, prompt // 10)), *range(1000 * (number + 1), 1000 * (number + 1) + 40)]

        def count(_, number=number):
            counts[number] = counts.get(number, 0) + 1

        leg = bench.leg(number, names[: prompt // 10], prompt, output, ended=count)
        bench.loop.after(at_s, lambda leg=leg: bench.engine.add(leg))
    bench.loop.run()

    assert counts == dict.fromkeys(range(len(legs)), 1)
    assert set(bench.first) == set(counts)
    assert bench.engine.kv_use == 0
    assert sum(tokens for _, tokens in bench.engine.log.gaps) == sum(output - 1 for *_, output in legs)
