"""Any order of events, on both engines and between them: right bytes, and every block back."""

from hypothesis import settings

from support.pair_machine import PairMachine

PairMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPair = PairMachine.TestCase
