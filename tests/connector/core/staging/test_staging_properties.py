"""Staging at random: see :mod:`support.staging_machine` for what happens and what must hold."""

from hypothesis import settings

from support.staging_machine import StagingMachine

TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
