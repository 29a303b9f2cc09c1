"""A story of `make soak-kinds`: faults between two engines in processes of their own, over real NIXL."""

import random

import pytest

from benchmarks.connector.kinds_soak import Story, shapes

# Leases of seconds run out in it.
pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(300)]


def test_texts_are_right_after_faults_and_nothing_is_held():
    story = Story(*shapes("full attention", random.Random(7)), 7)

    try:
        story.play()
    finally:
        story.close()

    assert story.counts["requests loaded"] > 0
