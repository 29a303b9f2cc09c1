"""Whose assignments are forgotten, among processes that look at the same store at different times."""

import random
from dataclasses import replace

import pytest

from pdrelay_proxy.core.discovery.store_entries import Assignment
from pdrelay_proxy.core.discovery.unnamed_assignments import GRACE_S, UnnamedAssignments
from pdrelay_proxy.core.fleet.target import Key
from pdrelay_proxy.core.model import EngineRole, Role

EVERY_S = 5.0
KEY = Key(Role.DECODE, "d:80")
TURNED = Assignment(KEY, EngineRole.PREFILL)


@pytest.mark.parametrize("others", [1, 8, 32])
def test_what_one_of_many_processes_names_is_kept(others):
    """Each worker is one, and those of other settings doubt it one after the other: never for so long together."""
    dice = random.Random(others)
    for _ in range(20):
        store = {KEY: TURNED}
        processes = [(dice.uniform(0, EVERY_S), UnnamedAssignments(), number == 0) for number in range(others + 1)]
        looks = [
            (phase + EVERY_S * turn, one, names)
            for phase, one, names in processes
            for turn in range(int(1300 / EVERY_S))
        ]
        for at, one, names in sorted(looks, key=lambda look: look[0]):
            for _, after in one.decide(store, lambda _, names=names: names, now=at):
                assert after is not None, f"forgotten at {at:.0f} s"
                store[KEY] = after
                one.written(after, now=at)


@pytest.mark.parametrize("now", [0.1, 7.3, 100.7])
def test_the_first_look_doubts(now):
    """Whatever the clock shows: ten minutes before now, and ten minutes after that, need not be now again."""
    assert len(UnnamedAssignments().decide({KEY: TURNED}, lambda _: False, now=now)) == 1


def test_a_doubt_that_was_not_written_is_written_at_the_next_look():
    """The store was away; ten minutes more would be ten minutes in which another engine gets the role."""
    one = UnnamedAssignments()
    doubt = replace(TURNED, is_unnamed=True)
    looks = [one.decide({KEY: TURNED}, lambda _: False, now=at) for at in (0.0, EVERY_S)]
    one.written(doubt, now=EVERY_S)

    assert looks == [[(TURNED, doubt)]] * 2
    assert one.decide({KEY: TURNED}, lambda _: False, now=2 * EVERY_S) == []
    assert one.decide({KEY: doubt}, lambda _: False, now=3 * EVERY_S) == []
    assert one.decide({KEY: doubt}, lambda _: False, now=3 * EVERY_S + GRACE_S) == [(doubt, None)]
