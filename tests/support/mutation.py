"""Rules of a design that are turned off: each must make a story fail."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdrelay_connector.errors import IllegalTransition

NOTICED = (AssertionError, IllegalTransition, KeyError, ExceptionGroup)


def search(machine, examples):
    """Return a story that tries orders of events until what is broken shows; as that takes seconds, it is slow."""
    options = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=(Phase.generate,), report_multiple_bugs=False,
    )  # fmt: skip

    def any_order_of_events():
        run_state_machine_as_test(machine, settings=options)

    return any_order_of_events


def each_mutant(mutants):
    """Parametrize a test with pairs of (what turns a rule off, the story that must fail then)."""
    return pytest.mark.parametrize(
        ("mutate", "story"),
        [pytest.param(*pair, marks=_marks(pair[1])) for pair in mutants],
        ids=lambda part: part.__name__,
    )


def _marks(story):
    return (pytest.mark.slow, pytest.mark.timeout(300)) if story.__name__ == "any_order_of_events" else ()
