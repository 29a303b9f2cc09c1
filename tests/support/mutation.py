"""Rules of a design that are turned off: a search that none of them fails proves nothing."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdrelay_connector.errors import IllegalTransition

NOTICED = (AssertionError, IllegalTransition, KeyError, ExceptionGroup)


def search(machine, examples):
    """Try orders of events until what is broken shows."""
    options = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=(Phase.generate,), report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=options)


def each_mutant(*mutants):
    """Parametrize a test with what turns a rule off; a search takes seconds."""
    return pytest.mark.parametrize(
        "mutate",
        [pytest.param(mutate, marks=(pytest.mark.slow, pytest.mark.timeout(300))) for mutate in mutants],
        ids=lambda mutate: mutate.__name__,
    )
