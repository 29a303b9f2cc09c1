"""Stories of many clients and engines that fail: each answer is that of one engine to that body alone, or an error.

In half of them there are tenants, models and mistakes: the engine is one of the model, and the answer for its tenant.
"""

import random
from functools import partial

import pytest

from support.stories import Story, tell
from support.tenant_stories import TenantStory

FEW = 20
MANY = 1500


@pytest.fixture(params=[Story, TenantStory])
def kind(request, tmp_path):
    """What makes a story of a seed."""
    return request.param if request.param is Story else partial(TenantStory, folder=tmp_path)


@pytest.mark.parametrize("seed", range(FEW))
def test_each_answer_is_that_of_one_engine(seed, kind):
    """However it was sent, whatever becomes of engines, legs and other clients; and nothing is left."""
    tell(seed, kind)


@pytest.mark.thorough  # two minutes of CPU
@pytest.mark.timeout(1800)
def test_so_it_is_in_many_more_stories(kind):
    """Others each time."""
    first = random.SystemRandom().randrange(2**32)
    for seed in range(first, first + MANY):
        try:
            tell(seed, kind)
        except BaseException as fault:
            fault.add_note(f"the seed of the story: {seed}")
            raise
