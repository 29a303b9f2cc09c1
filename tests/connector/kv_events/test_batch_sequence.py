"""Batches in order, whatever is lost on the way, and no block that is only believed in."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.kv_events.batch_sequence import GAP, BatchSequence


def payload(number):
    return number.to_bytes(8, "big")


def numbers(sequence):
    return [step if step is GAP else int.from_bytes(step, "big") for step in sequence.take_steps()]


def live(sequence, *found):
    for number in found:
        sequence.live(number, payload(number))


def replay(sequence, *found):
    sequence.begin_replay()
    for number in found:
        sequence.replayed(number, payload(number))
    sequence.end_replay()


def test_batches_in_order_pass():
    sequence = BatchSequence()
    live(sequence, 0, 1, 2)

    assert numbers(sequence) == [0, 1, 2]
    assert sequence.missing() is None


def test_a_replay_and_what_was_published_meanwhile_overlap():
    sequence = BatchSequence()
    replay(sequence, 0, 1, 2, 3)
    live(sequence, 2, 3, 4)

    assert numbers(sequence) == [0, 1, 2, 3, 4]


def test_a_gap_is_asked_for_and_filled():
    sequence = BatchSequence()
    live(sequence, 0, 1, 4)
    asked = sequence.missing()
    replay(sequence, 2, 3, 4)

    assert asked == 2
    assert numbers(sequence) == [0, 1, 2, 3, 4]
    assert sequence.gaps == 0


def test_a_gap_that_replay_does_not_fill_is_told_once():
    """What came before it is wrong now: blocks of it may have been evicted."""
    sequence = BatchSequence()
    live(sequence, 0, 5)
    replay(sequence)
    live(sequence, 6)

    assert numbers(sequence) == [0, GAP, 5, 6]
    assert sequence.missing() is None


def test_a_replay_that_lost_a_part_is_repeated_while_it_helps():
    """vLLM's ROUTER drops what does not fit into its queue of 1,000 (before 0.33)."""
    sequence = BatchSequence()
    live(sequence, 9)
    replay(sequence, 0, 1, 3, 4)
    again = sequence.missing()
    replay(sequence, 2, 3, 4, 5, 6, 7, 8)

    assert again == 2
    assert numbers(sequence) == list(range(10))


def test_a_subscriber_that_starts_late_begins_with_what_there_is():
    sequence = BatchSequence()
    replay(sequence, 100, 101)

    assert numbers(sequence) == [GAP, 100, 101]


def test_numbers_that_begin_anew_are_another_publishers():
    """All that was known is gone with the engine core."""
    sequence = BatchSequence()
    live(sequence, 0, 1, 2, 0)

    assert numbers(sequence) == [0, 1, 2, GAP, 0]


def test_what_waits_behind_a_gap_is_bounded():
    sequence = BatchSequence(max_waiting=20)
    live(sequence, 5, 6, 7)

    assert numbers(sequence) == [GAP, 5, 6, 7]


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=10), max_size=60),
    st.integers(0, 40),
)
def test_no_batch_is_left_out_in_silence(heard, replays, kept):
    """Subscriptions and replays lose what they like: between two batches that are not neighbours there is a gap."""
    sequence = BatchSequence()
    told = []
    attempts = iter(replays)

    def replay_some(last):
        start = sequence.expected
        lost = next(attempts, [True])
        found = [n for n in range(max(start, last + 1 - kept), last + 1) if lost[n % len(lost)]]
        for number in found:
            sequence.replayed(number, payload(number))
        sequence.end_replay()
        told.extend(numbers(sequence))

    for number, arrives in enumerate(heard):
        if arrives:
            live(sequence, number)
            told.extend(numbers(sequence))
        while sequence.missing() is not None:
            replay_some(number)
    before = -1
    for step in told:
        assert step is GAP or before is GAP or step == before + 1
        before = step

    assert told == sorted(told, key=lambda step: step is GAP) or GAP in told
    assert [step for step in told if step is not GAP][-1:] in ([], [sequence.expected - 1])
