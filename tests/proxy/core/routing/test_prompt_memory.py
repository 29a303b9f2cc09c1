"""What the router takes an engine's cache for: right for what it has sent, forgotten in time, and bounded."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from support.searching import examples

D0, D1 = InstanceId("decode-0"), InstanceId("decode-1")


def prompt(*texts):
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    return PromptBlocks(json.dumps(messages).encode(), {})


def test_the_next_turn_finds_prompt_and_answer():
    """What D generated is in its cache, too."""
    memory = PromptMemory(10.0)
    first = prompt("a question")
    second = prompt("a question", "an answer", "a new one")
    memory.sent(D0, first, since=0.0, now=0.0)
    assert memory.matched(D0, second, since=0.0, now=1.0) == first.size
    assert memory.matched(D0, second, since=0.0, now=1.0, is_there=True) == 0

    memory.answered(D0, first, 500, now=1.0)
    assert memory.matched(D0, second, since=0.0, now=2.0, is_there=True) == second.ends[1]
    assert second.ends[1] == second.size - len(', {"role": "user", "content": "a new one"}')
    assert memory.matched(D1, second, since=0.0, now=2.0) == 0


def test_a_prompt_is_on_its_way_until_the_engine_has_computed_it():
    """A moment later its events tell, and what it has evicted since does not count."""
    memory = PromptMemory(10.0)
    first = prompt("a question")
    second = prompt("a question", "an answer", "a new one")
    memory.sent(D0, first, since=0.0, now=0.0)
    assert memory.on_its_way(D0, second, since=0.0, now=1.0) == first.size

    memory.arrived(D0, first, now=1.0)
    assert [memory.on_its_way(D0, second, since=0.0, now=now) for now in (1.2, 1.3)] == [first.size, 0]
    assert memory.matched(D0, second, since=0.0, now=1.3) == first.size

    memory.sent(D0, second, since=0.0, now=2.0)
    assert memory.on_its_way(D0, second, since=0.0, now=2.0) == second.size
    assert memory.on_its_way(D0, second, since=2.1, now=2.2) == 0
    assert memory.on_its_way(D1, second, since=0.0, now=2.0) == 0


def test_a_known_prompt_that_is_sent_again_is_on_its_way_until_it_arrives_again():
    """The engine may have evicted it meanwhile; then it computes it once more, and no other engine should do so."""
    memory = PromptMemory(1000.0)
    first = prompt("a question")
    memory.sent(D0, first, since=0.0, now=0.0)
    memory.arrived(D0, first, now=1.0)
    memory.sent(D0, first, since=0.0, now=100.0)
    coming = [memory.on_its_way(D0, first, since=now - 5.0, now=now) for now in (100.0, 100.5, 103.0)]
    memory.arrived(D0, first, now=103.0)

    assert coming == [first.size] * 3
    assert [memory.on_its_way(D0, first, since=98.0, now=now) for now in (103.2, 103.3)] == [first.size, 0]
    assert memory.matched(D0, first, since=0.0, now=103.3, is_there=True) == first.size


def test_a_decode_engine_has_a_prompt_and_its_answer_while_the_prompt_comes_again():
    """That it is on its way once more takes away nothing of what an answer has shown."""
    memory = PromptMemory(1000.0)
    first = prompt("a question")
    second = prompt("a question", "an answer", "a new one")
    memory.answered(D0, first, 500, now=0.0)
    memory.sent(D0, first, since=0.0, now=100.0)
    while_it_comes = memory.matched(D0, second, since=0.0, now=100.5, is_there=True)
    coming = memory.on_its_way(D0, first, since=0.0, now=100.5)
    memory.arrived(D0, first, now=101.0)

    assert (while_it_comes, coming) == (second.ends[1], first.size)
    assert memory.matched(D0, second, since=0.0, now=101.5, is_there=True) == second.ends[1]
    assert memory.on_its_way(D0, first, since=0.0, now=101.5) == 0


@given(st.lists(st.tuples(st.sampled_from(["sent", "arrived"]), st.floats(0.01, 3.0)), min_size=1, max_size=12))
def test_a_prompt_is_on_its_way_as_long_as_it_was_sent_after_it_arrived_last(events):
    """However often it is sent; and what has arrived counts for a quarter of a second more."""
    memory = PromptMemory(1000.0)
    first = prompt("a question")
    now = 0.0
    sent_at, arrived_at = None, None
    for event, seconds in events:
        if event == "sent":
            memory.sent(D0, first, since=0.0, now=now)
            sent_at = now
        elif sent_at is not None:
            memory.arrived(D0, first, now=now)
            if arrived_at is None or arrived_at < sent_at:
                arrived_at = now
        now += seconds
        comes = sent_at is not None and (arrived_at is None or arrived_at < sent_at or now <= arrived_at + 0.25)

        assert memory.on_its_way(D0, first, since=0.0, now=now) == (first.size if comes else 0)


def test_an_answer_counts_for_no_more_than_was_relayed():
    """A client may put a document where the answer was; nobody has that."""
    memory = PromptMemory(10.0)
    first = prompt("q")
    memory.answered(D0, first, 500, now=0.0)

    assert memory.matched(D0, prompt("q", "x" * 9000, "?"), since=0.0, now=0.0) == first.size + 500


def test_another_branch_of_a_conversation_has_the_answer_too():
    """A user may ask another question in place of the second one."""
    memory = PromptMemory(10.0)
    first = prompt("q")
    memory.answered(D0, first, 500, now=0.0)
    memory.sent(D0, prompt("q", "a", "one"), since=0.0, now=1.0)
    other = prompt("q", "a", "other")

    assert memory.matched(D0, other, since=0.0, now=2.0, is_there=True) == other.ends[1]


def test_what_is_not_used_is_forgotten():
    """The engine has evicted it, most likely; each turn begins the time anew."""
    memory = PromptMemory(10.0)
    first = prompt("q" * 2000)
    second = prompt("q" * 2000, "a", "b")
    memory.answered(D0, first, 10, now=0.0)
    memory.sent(D0, second, since=0.0, now=9.0)
    assert memory.matched(D0, second, since=0.0, now=19.0)
    assert memory.matched(D0, second, since=0.0, now=19.1) == 0

    memory.sent(D1, prompt("x"), since=0.0, now=30.0)
    assert len(memory) == 1


def test_a_prompt_that_is_sent_again_does_not_bring_back_what_was_forgotten():
    """It is on its way once more; whether its answer comes is not known."""
    memory = PromptMemory(10.0)
    first = prompt("q")
    memory.answered(D0, first, 10, now=0.0)
    memory.sent(D0, first, since=0.0, now=10.1)

    assert memory.matched(D0, first, since=0.0, now=11.0) == first.size
    assert memory.matched(D0, first, since=0.0, now=11.0, is_there=True) == 0


def test_a_restarted_engine_has_nothing():
    """What it gets afterwards it has."""
    memory = PromptMemory(99.0)
    first = prompt("q")
    second = prompt("q", "a", "b")
    memory.answered(D0, first, 10, now=1.0)
    assert memory.matched(D0, second, since=2.0, now=3.0) == 0

    memory.sent(D0, first, since=2.0, now=3.0)
    assert memory.matched(D0, second, since=2.0, now=4.0) == first.size
    assert memory.matched(D0, second, since=2.0, now=4.0, is_there=True) == 0


def test_an_engine_can_say_that_it_has_less():
    """The rest of the conversation is forgotten, and what is shared with others stays."""
    memory = PromptMemory(99.0)
    first = prompt("system" * 100, "", "q" * 3000)
    memory.answered(D0, first, 10, now=0.0)
    memory.forget(D0, first, 700)
    left = memory.matched(D0, first, since=0.0, now=0.0, is_there=True)

    assert 0 < left <= 700


def test_an_answer_grows_old_though_its_prompt_is_sent_again():
    """Only a prompt that goes on behind the answer uses the blocks of the answer."""
    memory = PromptMemory(20.0)
    asked = prompt("a")
    goes_on = prompt("a", "y" * 300, "z")
    memory.sent(D0, asked, since=0.0, now=0.0)
    memory.answered(D0, asked, 10_000, now=0.0)
    memory.sent(D0, asked, since=0.0, now=15.0)

    early, late = (memory.matched(D0, goes_on, since=0.0, now=now) for now in (15.0, 30.0))

    assert late == asked.size < early


ENGINES = [InstanceId(f"decode-{number}") for number in range(3)]
MOST = 40
LIFETIME_S = 20.0


class Turns(RuleBasedStateMachine):
    """Random turns of some chats, edits, restarts and feedback, beside a full account of what was sent."""

    @initialize()
    def begin(self):
        self.memory, self.now, self.dice = PromptMemory(LIFETIME_S, most=MOST), 0.0, random.Random(0)
        self.since = dict.fromkeys(ENGINES, 0.0)
        self.chats = [["a"]]
        self.sent = []  # engine, when, messages, whether it was answered, and how much was there before

    def chat(self, place):
        return self.chats[place % len(self.chats)]

    @rule(place=st.integers(0, 9), at=st.sampled_from(ENGINES), answers=st.booleans(), size=st.integers(1, 900))
    def turn(self, place, at, answers, size):
        texts = self.chat(place)
        there = self.most(at, texts, is_there=True)  # a prompt that is sent uses it: its time begins anew
        self.memory.sent(at, prompt(*texts), since=self.since[at], now=self.now)
        if answers:
            self.memory.answered(at, prompt(*texts), 10_000, now=self.now)
        self.sent.append((at, self.now, list(texts), answers, there))
        if answers and len(texts) < 9:
            texts += ["y" * size, "z" * (size // 2)]

    @rule(place=st.integers(0, 9), cut=st.integers(1, 9))
    def edit(self, place, cut):
        self.chats = [*self.chats[-4:], [*self.chat(place)[:cut], "edited"][: 1 + cut // 2 * 2]]

    @rule(at=st.sampled_from(ENGINES))
    def restart(self, at):
        self.now += 0.001
        self.since[at] = self.now

    @rule(place=st.integers(0, 9), at=st.sampled_from(ENGINES), share=st.floats(0, 1))
    def miss(self, place, at, share):
        found = prompt(*self.chat(place))
        self.memory.forget(at, found, int(share * found.size))

    @rule(seconds=st.sampled_from([0.5, 3.0, 15.0, 25.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def no_more_than_was_sent(self):
        if not hasattr(self, "memory"):
            return
        assert len(self.memory) <= MOST
        for texts in self.chats[-3:]:
            for at in ENGINES:
                self.compare(at, texts)

    def compare(self, at, texts):
        """An engine can have no more than what the account says; less, if it was forgotten."""
        found = prompt(*texts)
        since = self.since[at]
        for is_there in (False, True):
            matched = self.memory.matched(at, found, since=since, now=self.now, is_there=is_there)
            assert matched <= self.most(at, texts, is_there=is_there)

    def most(self, at, texts, *, is_there):
        """Return how many bytes of a prompt an engine can have by the account."""
        oldest = max(self.since[at], self.now - LIFETIME_S)
        most = 0
        for engine, when, then, answered, there in self.sent:
            if engine == at and when >= oldest:
                same = next((i for i, (a, b) in enumerate(zip(texts, then, strict=False)) if a != b), None)
                known = len(then) + 1 if same is None and answered else len(then) if same is None else same + 1
                size = prompt(*texts[:known]).size
                most = max(most, size if answered or not is_there else min(size, there))
        return most


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
