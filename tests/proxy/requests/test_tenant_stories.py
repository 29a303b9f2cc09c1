"""Stories of tenants, models and mistakes: each answer is that of one engine of the model, for its tenant alone."""

import random
from functools import partial

import pytest

from support.stories import tell
from support.tenant_stories import TenantStory

FEW = 20
MANY = 1500


@pytest.mark.parametrize("seed", range(FEW))
def test_each_answer_is_that_of_its_model_and_tenant(seed, tmp_path):
    """However it was sent, whatever others send; and nothing is left."""
    tell(seed, partial(TenantStory, folder=tmp_path))


@pytest.mark.thorough  # two minutes of CPU
@pytest.mark.timeout(1800)
def test_so_it_is_in_many_more_stories_of_tenants(tmp_path):
    """Others each time."""
    first = random.SystemRandom().randrange(2**32)
    for seed in range(first, first + MANY):
        try:
            tell(seed, partial(TenantStory, folder=tmp_path))
        except BaseException as fault:
            fault.add_note(f"the seed of the story: {seed}")
            raise
