"""The lease on roles: one router decides, and what it has done outlives it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.features.roles.role_lease import LASTS_S, RoleLease
from support.searching import examples


class Text:
    """A text that is replaced as a whole, if it is as it was read."""

    def __init__(self):
        self.text = ""

    def swap(self, before, after):
        if self.text != before:
            return False
        self.text = after
        return True


def look(lease, shared, now, wall=None, *, turns=False):
    """Read, decide, write; return what the router may believe."""
    before = shared.text
    view = lease.view_of(before, now=now, wall=now if wall is None else wall, turns=turns)
    if view.holds and view.text is not None:
        if not shared.swap(before, view.text):
            return False
        lease.written(view, now=now)
    return view.holds


def test_the_first_one_has_it_and_keeps_it():
    """Whoever else looks measures, and waits."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")

    assert look(one, shared, 0.0)
    for now in range(1, 300):
        assert look(one, shared, float(now))
        assert not look(two, shared, now + 0.5)


def test_another_one_takes_it_when_it_is_not_renewed():
    """The holder was killed, perhaps in a turn. It is the other one's own clock that counts."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 1e6)

    assert not look(two, shared, 5.0)
    assert not look(two, shared, 5.0 + LASTS_S - 0.1)
    assert look(two, shared, 5.0 + LASTS_S)
    assert not look(one, shared, 1e6 + LASTS_S)


def test_a_turn_that_does_not_count_is_written_and_not_remembered():
    """The holder must still have the lease when an engine turns; what is no turn of the hour's takes none from it."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 0.0)
    view = one.view_of(shared.text, now=1.0, wall=5000.0, turns=True, counts=False)

    assert view.holds
    assert view.text != shared.text
    assert view.changed_at == ()
    assert two.view_of(shared.text, now=1.0, wall=5000.0, turns=True, counts=False).text is None


def test_turns_outlive_their_router():
    """The cool-down and the turns of an hour are the fleet's."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 0.0, wall=5000.0, turns=True)
    two.view_of(shared.text, now=0.0, wall=5000.0)
    view = two.view_of(shared.text, now=LASTS_S, wall=5000.0 + LASTS_S)

    assert (view.holds, view.changed_at) == (True, (5000.0,))
    assert two.view_of(shared.text, now=LASTS_S, wall=8601.0).changed_at == ()


def test_a_turn_of_the_future_becomes_older_like_all_others():
    """A host whose clock was a day ahead would have stopped the controllers of the others for a day."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 0.0, wall=90_000.0, turns=True)
    look(two, shared, 0.0, wall=3_600.0)
    look(two, shared, LASTS_S, wall=3_600.0 + LASTS_S)
    view = two.view_of(shared.text, now=LASTS_S + 600.0, wall=4_200.0 + LASTS_S)

    assert (view.holds, view.changed_at) == (True, (3_600.0 + LASTS_S,))
    assert two.view_of(shared.text, now=LASTS_S + 3_600.0, wall=7_200.0 + LASTS_S).changed_at == ()


def test_turns_of_the_future_stay_as_many_as_they_were():
    """A clock that was set back by hours: six turns would have counted as one, and five more could follow at once."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    for minute in range(6):
        look(one, shared, 60.0 * minute, wall=10_000.0 + 60.0 * minute, turns=True)
    two.view_of(shared.text, now=0.0, wall=3_600.0)

    for lease, now in ((one, 400.0), (two, LASTS_S), (two, LASTS_S + 10.0)):
        view = lease.view_of(shared.text, now=now, wall=3_600.0)
        assert len(view.changed_at) == 6
        if view.text is not None:
            shared.text = view.text
            lease.written(view, now=now)


@pytest.mark.parametrize("later", ["", "as it was before the turns"])
def test_a_store_that_loses_its_memory_does_not_give_the_turns_of_an_hour_anew(later):
    """A Redis without a disk that starts again, or with yesterday's: the fleet has turned all the same."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 0.0, wall=5_000.0)
    before = shared.text
    for now in (1.0, 100.0):
        look(one, shared, now, wall=5_000.0 + now, turns=True)
    shared.text = later and before
    view = one.view_of(shared.text, now=200.0, wall=5_200.0)

    assert (view.holds, view.changed_at) == (True, (5_001.0, 5_100.0))
    assert look(one, shared, 200.0, wall=5_200.0)
    assert two.view_of(shared.text, now=200.0, wall=5_200.0).changed_at == (5_001.0, 5_100.0)
    assert one.view_of("", now=3_700.0, wall=8_700.0).changed_at == ()


def test_a_turn_that_was_not_written_is_none():
    """The write has failed, so nothing has turned: to remember it would spend a turn."""
    shared = Text()
    one = RoleLease("one")
    look(one, shared, 0.0)
    one.view_of(shared.text, now=1.0, wall=1.0, turns=True)

    assert one.view_of("", now=10.0, wall=10.0).changed_at == ()


def test_a_turn_is_written_even_if_the_lease_is_fresh():
    """A holder that hung may have lost it: the write fails then, and nothing turns."""
    shared = Text()
    one = RoleLease("one")
    two = RoleLease("two")
    look(one, shared, 0.0)
    before = shared.text
    view = one.view_of(before, now=1.0, wall=1.0, turns=True)
    look(two, shared, 1.0)
    assert look(two, shared, 1.0 + LASTS_S)

    assert view.text is not None
    assert not shared.swap(before, view.text)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from(["one", "two", "three"]), st.floats(0.1, 15.0), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_at_most_one_router_writes_a_turn_on_what_it_has_read(steps):
    """Whatever hangs between reading and writing: each turn that is begun is in the text, once, in order."""
    shared = Text()
    now = 0.0
    begun = []
    leases = {name: RoleLease(name) for name in ("one", "two", "three")}
    hung = {}
    for name, later, turns, hangs in steps:
        now += later
        before, view = hung.pop(name, None) or (
            shared.text,
            leases[name].view_of(shared.text, now=now, wall=now, turns=turns),
        )
        if hangs:
            hung[name] = before, view
        elif view.holds and view.text is not None and shared.swap(before, view.text):
            leases[name].written(view, now=now)
            begun += [at for at in view.changed_at if at not in begun]
    last = RoleLease("last").view_of(shared.text, now=now, wall=now).changed_at

    assert list(last) == [at for at in begun if now - 3600 < at]


# The next number could not be written, and no router would ever decide again.
LONG_NUMBER = f'{{"holder":"","number":{"9" * 4300}}}'
LONG_NAME = f'{{"holder":"{"x" * 301}","number":1}}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"holder":3}', '{"holder":"x"}', "\x00" * 100, LONG_NUMBER, LONG_NAME]
)
def test_what_is_no_lease_is_replaced(text):
    """Somebody has edited it, or another version has written it."""
    assert RoleLease("one").view_of(text, now=0.0, wall=0.0).holds
