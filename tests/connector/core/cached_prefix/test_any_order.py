"""Searches, reads and a changing cache, in any order: no wrong byte, and no block that stays pinned."""

import pytest
from hypothesis import settings

from support.return_machine import ReturnMachine
from support.searching import examples

ReturnMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestReturn = pytest.mark.slow(ReturnMachine.TestCase)  # any order of events: seconds
