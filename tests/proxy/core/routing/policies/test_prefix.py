"""Prompts go where their beginning is."""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.prompt_blocks import BLOCK
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.prefix import LEAST, SLACK, Prefix
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory

ENGINES = [Instance(InstanceId(f"p{i}"), Role.PREFILL, Address("http", "h", i + 1)) for i in range(4)]


class Known:
    """Caches of engines that never restart, at one time."""

    def __init__(self, most=1000):
        self.memory = PromptMemory(1.0, most=most)

    def matches(self, among, asked, *, is_there=False):
        return [self.memory.matched(i.id, asked.blocks, since=0.0, now=0.0, is_there=is_there) for i in among]

    def sent(self, instance, asked):
        self.memory.sent(instance.id, asked.blocks, since=0.0, now=0.0)


def ask(*letters):
    """A prompt of so many blocks."""
    return RoutingHints(prompt="".join(letter * BLOCK for letter in letters).encode())


def idle(_):
    return 0.0


def prefix(load=idle, otherwise=None, **known):
    return Prefix(load, otherwise or LeastLoaded(load), Known(**known))


def test_a_prompt_goes_to_the_longest_common_beginning():
    """The engine that has more of it cached computes less."""
    policy = prefix(otherwise=RoundRobin())
    first, second = policy.choose(ENGINES, ask(*"abc")), policy.choose(ENGINES, ask(*"xyz"))
    assert first != second
    assert policy.choose(ENGINES, ask(*"abcd")) == first
    assert policy.choose(ENGINES, ask(*"xyzz")) == second
    third = policy.choose([one for one in ENGINES if one != first], ask(*"abq"))
    assert policy.choose(ENGINES, ask(*"abqq")) == third


def test_a_block_is_known_by_all_that_came_before_it():
    """A cache is of no use in the middle of a prompt."""
    policy = prefix(otherwise=RoundRobin())
    policy.choose(ENGINES, ask(*"abc"))
    others = [policy.copy().choose(ENGINES, ask(*"xbc")), policy.copy().choose(ENGINES, ask(*"yyyabc"))]

    assert others == [ENGINES[1]] * 2


def test_an_engine_that_is_too_busy_is_passed_over():
    """Or one popular beginning would make one engine do everything."""
    load = dict.fromkeys([one.id for one in ENGINES], 0.0)
    policy = prefix(lambda one: load[one.id])
    home = policy.choose(ENGINES, ask("a"))
    load[home.id] = SLACK
    assert policy.choose(ENGINES, ask("a")) == home
    load[home.id] = SLACK + 1
    assert policy.choose(ENGINES, ask("a")) != home


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 3)), max_size=80))
def test_the_load_stays_within_its_limit(steps):
    """Whatever the prompts: nobody who is chosen is more than the slack above the least loaded."""
    load = dict.fromkeys([one.id for one in ENGINES], 0)
    policy = prefix(lambda one: load[one.id])
    for letters, ended in steps:
        least = min(load.values())
        chosen = policy.choose(ENGINES, ask(*letters))
        assert load[chosen.id] <= least + SLACK
        load[chosen.id] += 1
        load[ENGINES[ended].id] = max(0, load[ENGINES[ended].id] - 1)


def test_memory_is_bounded_and_the_beginning_is_forgotten_last():
    """Without its beginning the rest of a prompt is of no use."""
    policy = prefix(otherwise=RoundRobin(), most=10)
    home = policy.choose(ENGINES, ask(*"abcdefgh"))
    policy.choose(ENGINES, ask(*"uvwxyz"))

    assert len(policy._caches.memory) == 10
    assert policy.choose(ENGINES, ask(*"abcd")) == home


def chat(*texts):
    """The messages of a chat, with answers in between."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    return RoutingHints(prompt=json.dumps(messages).encode())


def test_a_few_words_in_common_do_not_gather_prompts():
    """A short system prompt is no reason to send everybody to one engine; half of a short prompt is."""
    policy = prefix()
    others = [policy.choose(ENGINES, chat("system", "", f"question {number} " * 10)).id for number in range(40)]
    assert set(Counter(others).values()) == {10}

    question = chat("a first question")
    first = policy.choose(ENGINES, question)
    policy._caches.memory.answered(first.id, question.blocks, 300, now=0.0)
    assert len(question.prompt) < LEAST
    assert {policy.choose(ENGINES, chat("a first question", "yes", "why?")) for _ in range(8)} == {first}


def test_what_leaves_no_trace_chooses_alike():
    """An operator asks where a request would go, and that changes nothing."""
    policy = prefix(otherwise=RoundRobin())
    home = policy.choose(ENGINES, ask(*"abc"))
    known = len(policy._caches.memory)

    assert policy.copy().choose(ENGINES, ask(*"abcd")) == home
    assert policy.copy().choose(ENGINES, ask(*"xyz")) == policy.copy().choose(ENGINES, ask(*"xyz"))
    assert len(policy._caches.memory) == known


def room(*busy):
    """Return a bound that keeps prompts from some engines."""
    return AloneBound(Registry(), lambda: 0.0, lambda instance, _: instance not in busy)


def answered(policy, prompt, *engines):
    """Have engines keep a prompt and its answer."""
    for one in engines:
        policy._caches.memory.answered(one.id, prompt.blocks, 10, now=0.0)


def test_only_what_has_been_answered_counts_as_cached():
    """Eight equal prompts at once must not all be computed by one decode engine, for the KV cache that is to come."""
    policy = prefix()
    home = policy.choose(ENGINES, ask(*"abc"))
    prompt = ask(*"abc")
    found = policy.holding(ENGINES, prompt, 100, room())
    assert (found.engines, found.cached) == ((), 0)

    answered(policy, prompt, home)
    found = policy.holding(ENGINES, prompt, 100, room())
    assert (found.engines, found.cached, found.is_bound) == ([home], 3 * BLOCK, False)


def test_an_engine_whose_streams_cannot_bear_it_leaves_a_prompt_to_another_one_that_has_it():
    """Or to a prefill engine, if there is none."""
    policy = prefix()
    prompt = ask(*"abcd")
    answered(policy, prompt, ENGINES[1])
    answered(policy, ask(*"abc"), ENGINES[2])
    found = [policy.holding(ENGINES, prompt, 2 * BLOCK, room(*ENGINES[1:last])) for last in (1, 2, 3)]

    assert [list(one.engines) for one in found] == [[ENGINES[1]], [ENGINES[2]], []]
    assert [one.cached for one in found] == [4 * BLOCK, 3 * BLOCK, 4 * BLOCK]
    assert [one.is_bound for one in found] == [False, True, True]


def test_an_engine_that_is_too_busy_serves_nothing_alone():
    """Its cache is no reason to overload it."""
    load = dict.fromkeys([one.id for one in ENGINES], 0.0)
    policy = prefix(lambda one: load[one.id])
    prompt = ask(*"abcd")
    answered(policy, prompt, ENGINES[1])
    load[ENGINES[1].id] = SLACK + 1

    assert not policy.holding(ENGINES, prompt, 100, room()).engines


def test_a_few_words_in_common_are_not_what_a_prompt_is_served_alone_for():
    """A short system prompt would gather all short prompts."""
    policy = prefix()
    prompt = ask(*"abcd")
    policy._caches.memory.answered(ENGINES[1].id, RoutingHints(prompt=prompt.prompt[:100]).blocks, 10, now=0.0)

    assert not policy.holding(ENGINES, prompt, 4 * BLOCK, room()).engines
