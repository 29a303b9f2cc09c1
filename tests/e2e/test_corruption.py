"""The comparison has teeth: one wrong block out of many is seen in every single answer."""

import pytest

from support.cluster import Watch, faulty_decode
from support.questions import ask, client, differences, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def corrupting(fleet, model):
    """A decode engine whose connector puts one wrong block into every prompt."""
    with faulty_decode(fleet, model, "corrupting", "CorruptingConnector") as spec:
        yield spec


def test_a_wrong_block_is_caught(corrupting, engines, start_router, reference_answer):
    """Every prompt of two blocks or more comes out different, although everything else is as it should be."""
    url = start_router("router-corrupting", [engines.p0], [corrupting])
    asked = [question for question in questions(30, seed=4) if len(question.prompt) > 64][:10]
    with Watch(corrupting) as decode, client(url) as api:
        found = [differences(ask(api, question), reference_answer(question)) for question in asked]

    assert len(asked) == decode.delta("vllm:pdrelay_loads_total") == 10
    assert all(found)
