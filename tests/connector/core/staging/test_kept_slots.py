"""The wait for slots that failed loads keep: without a limit, a peer that hangs would stop all loads."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.staging.kept_slots import KeptSlots

TIMEOUT = 10.0


actions = st.tuples(st.sampled_from(["wait", "keep", "forget"]), st.integers(0, 4), st.integers(0, 8))


@given(st.lists(actions))
def test_each_has_the_limit_that_it_would_have_alone(steps):
    """From when another keeps slots, one or another, until it has its own: many short waits in a row are a long one."""
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
