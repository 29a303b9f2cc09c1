"""Any order of events, on both engines that push and between them: right bytes, and every block back."""

from hypothesis import settings

from support.push_machine import PushMachine

PushMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPush = PushMachine.TestCase
