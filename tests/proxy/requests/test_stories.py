"""Stories of many clients and engines that fail: each answer is that of one engine to that body alone, or an error."""

import random

import pytest

from support.stories import tell

FEW = 20
MANY = 1500


@pytest.mark.parametrize("seed", range(FEW))
def test_each_answer_is_that_of_one_engine(seed):
    """Whatever becomes of engines, legs and other clients; and nothing is left."""
    tell(seed)


@pytest.mark.thorough  # a minute or two of CPU
@pytest.mark.timeout(1800)
def test_so_it_is_in_many_more_stories():
    """Others each time."""
    first = random.SystemRandom().randrange(2**32)
    for seed in range(first, first + MANY):
        try:
            tell(seed)
        except BaseException as fault:
            fault.add_note(f"the seed of the story: {seed}")
            raise
