"""Which deadline is next."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.deadlines import FEW, Deadlines

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abcdef"), st.sampled_from([*map(float, range(12)), inf])),
        st.tuples(st.just("discard"), st.sampled_from("abcdef")),
        st.tuples(st.just("take"), st.integers(0, 12)),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_is_what_a_look_at_all_of_them_would_say(steps):
    """Whether deadlines move forth, back, or away and back again."""
    deadlines = Deadlines()
    plain = {}
    for step, *args in steps:
        match step:
            case "set":
                deadlines.set(*args)
                plain[args[0]] = args[1]
            case "discard":
                deadlines.discard(*args)
                plain.pop(*args, None)
            case "take":
                due = {key: at for key, at in plain.items() if at <= args[0]}
                taken = deadlines.take_due(now=args[0])
                assert sorted(taken) == sorted(due)
                assert [due[key] for key in taken] == sorted(due.values())
                plain = {key: at for key, at in plain.items() if key not in due}
        finite = {key: at for key, at in plain.items() if at < inf}
        assert deadlines.next() == min(finite.values(), default=None)
        assert len(deadlines) == len(finite)
        assert deadlines.entries <= 3 * len(finite) + FEW


def test_equal_deadlines_pass_in_the_order_in_which_they_were_set():
    """First come, first served."""
    deadlines = Deadlines()
    for key in "zyx":
        deadlines.set(key, 1.0)

    assert deadlines.take_due(now=1.0) == ["z", "y", "x"]


def test_a_deadline_that_is_put_off_costs_no_memory():
    """Leases are renewed for hours."""
    deadlines = Deadlines()
    for beat in range(10_000):
        deadlines.set("a", float(beat))

    assert deadlines.entries == 1


def test_what_comes_and_goes_costs_no_memory():
    """Neither with deadlines far away, which never come to the top."""
    deadlines = Deadlines()
    deadlines.set("stays", 1.0)
    for number in range(10_000):
        deadlines.set(number, 1e9)
        deadlines.discard(number)

    assert deadlines.entries <= 3 + FEW
