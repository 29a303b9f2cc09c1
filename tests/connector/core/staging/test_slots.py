"""Room in a staging buffer: a slot that two loads have is one text in another's answer."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrelay_connector.core.staging.slots import Slots, SlotsGranted
from pdrelay_connector.errors import HostBufferTooSmall, IllegalTransition


def test_slots_are_handed_out_from_one_on():
    """Block id 0 means "not held" everywhere."""
    slots = Slots([3, 1])
    slots.enqueue("a", [3, 1])

    assert slots.take_granted() == [SlotsGranted("a", ((1, 2, 3), (1,)))]
    assert (len(slots), slots.groups, slots.granted) == (1, 2, 4)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ([1, 3], "3 slots of KV cache group 1 are wanted; staging_blocks is 2"),
        ([1], "slots of 1 KV cache groups are wanted; there are 2 groups"),
        ([1, 1, 1], "slots of 3 KV cache groups are wanted; there are 2 groups"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(wanted, sentence):
    """Waiting for it would hold up everybody, for ever."""
    slots = Slots([4, 2])
    with pytest.raises(HostBufferTooSmall, match=sentence):
        slots.enqueue("a", wanted)

    assert len(slots) == 0


def test_a_second_request_for_slots_is_a_bug():
    """The second answer would never be looked for."""
    slots = Slots([4])
    slots.enqueue("a", [1])
    with pytest.raises(IllegalTransition, match="a asks for slots twice"):
        slots.enqueue("a", [1])
    slots.take_granted()
    with pytest.raises(IllegalTransition):
        slots.enqueue("a", [1])


class SlotsMachine(RuleBasedStateMachine):
    """Everybody who asks, gets, gives back and gives up, in any order."""

    @initialize(counts=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def start(self, counts):
        self.counts, self.slots = counts, Slots(counts)
        self.line = {}
        self.held = {}
        self.serial = 0

    @rule(data=st.data())
    def ask(self, data):
        self.serial += 1
        wanted = [data.draw(st.integers(0, count)) for count in self.counts]
        self.slots.enqueue(self.serial, wanted)
        self.line[self.serial] = wanted

    @rule()
    def take(self):
        for ticket, groups in self.slots.take_granted():
            assert ticket == next(iter(self.line)), "somebody was overtaken"
            assert [len(group) for group in groups] == self.line.pop(ticket)
            self.held[ticket] = groups
        if self.line:
            first = next(iter(self.line.values()))
            assert any(want > count - len(self.all_of(g)) for g, (want, count) in enumerate(self.pairs(first)))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 100))
    def release(self, pick):
        ticket = list(self.held)[pick % len(self.held)]
        self.slots.release(ticket)
        del self.held[ticket]

    @precondition(lambda self: self.line)
    @rule(pick=st.integers(0, 100))
    def give_up(self, pick):
        ticket = list(self.line)[pick % len(self.line)]
        self.slots.release(ticket)
        del self.line[ticket]

    @invariant()
    def no_slot_is_had_twice(self):
        for group, count in enumerate(self.counts):
            had = self.all_of(group)
            assert len(had) == len(set(had))
            assert set(had) <= set(range(1, count + 1))
        assert len(self.slots) == len(self.line) + len(self.held)
        assert self.slots.granted == sum(len(self.all_of(group)) for group in range(len(self.counts)))

    def teardown(self):
        """Everything is given back, and then everything can be had at once."""
        if not hasattr(self, "slots"):
            return
        while self.held or self.line:
            for ticket in list(self.held):
                self.slots.release(ticket)
                del self.held[ticket]
            self.take()
        assert len(self.slots) == self.slots.granted == 0
        self.slots.enqueue("all", self.counts)
        assert self.slots.take_granted()[0].groups == tuple(tuple(range(1, count + 1)) for count in self.counts)

    def all_of(self, group):
        return [slot for groups in self.held.values() for slot in groups[group]]

    def pairs(self, wanted):
        return zip(wanted, self.counts, strict=True)


TestSlots = SlotsMachine.TestCase
