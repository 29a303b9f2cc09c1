"""The wait for slots that failed loads keep: without a limit, a peer that hangs would stop all loads."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.staging.kept_slots import KeptSlots

TIMEOUT = 10.0


def test_who_waits_has_a_limit_only_while_a_failed_one_keeps_slots():
    """Loads that go on free their slots by themselves, and a long queue is no failure."""
    slots = KeptSlots[str](TIMEOUT)
    slots.wait("b", now=0.0)
    assert slots.take_overdue(now=50.0) == []
    assert slots.next() is None
    slots.keep("a")
    assert slots.take_overdue(now=51.0) == []
    assert slots.next() == 61.0
    slots.forget("a")

    assert slots.take_overdue(now=61.0) == []
    assert slots.next() is None


def test_the_limit_stays_when_another_failed_one_takes_over():
    """Many short waits in a row are one long wait."""
    slots = KeptSlots[str](TIMEOUT)
    slots.wait("c", now=0.0)
    slots.keep("a")
    assert slots.take_overdue(now=1.0) == []
    slots.keep("b")
    slots.forget("a")
    assert slots.take_overdue(now=9.0) == []

    assert slots.take_overdue(now=11.0) == ["c"]
    assert slots.next() is None


def test_who_has_got_slots_does_not_wait():
    """It has deadlines of its own from there on."""
    slots = KeptSlots[str](TIMEOUT)
    slots.keep("a")
    slots.wait("b", now=0.0)
    slots.wait("c", now=1.0)
    assert slots.take_overdue(now=1.0) == []
    slots.forget("b")

    assert slots.take_overdue(now=100.0) == ["c"]


actions = st.tuples(st.sampled_from(["wait", "keep", "forget"]), st.integers(0, 4), st.integers(0, 8))


@given(st.lists(actions))
def test_each_has_the_limit_that_it_would_have_alone(steps):
    """One time stands for all that keep slots, and the first in line for all that wait."""
    slots = KeptSlots[int](TIMEOUT)
    due = dict[int, float | None]()
    keepers = set[int]()
    now = 0.0
    for action, owner, seconds in steps:
        if action == "wait" and owner not in due and owner not in keepers:
            slots.wait(owner, now=now)
            due[owner] = None
        elif action == "keep" and owner not in due:
            slots.keep(owner)
            keepers.add(owner)
        elif action == "forget":
            slots.forget(owner)
            due.pop(owner, None)
            keepers.discard(owner)
        for waiting, at in due.items():
            due[waiting] = (now + TIMEOUT if at is None else at) if keepers else None
        now_due = [waiting for waiting, at in due.items() if at is not None and at <= now]

        assert slots.take_overdue(now=now) == now_due
        due = {waiting: at for waiting, at in due.items() if waiting not in now_due}
        assert slots.next() == min((at for at in due.values() if at is not None), default=None)
        now += seconds
