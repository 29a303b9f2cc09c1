"""What the choice of engines gets to know of a request."""

import json

import pytest

from pdrelay_proxy.core.model import Api, GenerationRequest, RoutingHints
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.routing import routing_hints
from pdrelay_proxy.core.routing.routing_hints import hints_of_call

HEADERS = ((b"authorization", b"k"), (b"x-session-id", b"s"))


def call_of(api, raw, rank=None, headers=HEADERS):
    return GenerationRequest(api, parse(raw), headers, rank)


@pytest.mark.parametrize("api", Api)
def test_model_session_rank_and_the_beginning_of_the_prompt(api):
    """The prompt as it came: a policy compares beginnings, and must not need a parser."""
    raw = b'{"model":"m","%s" : [ "a",  "b" ]}' % PROMPTS[api].encode()

    assert hints_of_call(call_of(api, raw, 3), "s") == RoutingHints("m", "s", b'[ "a",  "b" ]', 3)


def test_a_long_prompt_is_neither_copied_nor_compared():
    """Unless a policy asks for its blocks: then they are found once, also for a request that is sent again."""
    raw = json.dumps({"prompt": "x" * 100_000}).encode()
    asked = hints_of_call(call_of(Api.COMPLETIONS, raw))
    assert isinstance(asked.prompt, memoryview)
    assert asked._blocks is None

    assert asked.blocks.size == 100_001  # without the last quote
    assert asked.once_more().blocks is asked.blocks


def test_a_model_that_is_learned_makes_other_hints_of_the_same_prompt():
    """Whoever has the first ones has what they were when engines were chosen by them."""
    asked = hints_of_call(call_of(Api.COMPLETIONS, b'{"prompt":"x"}', 1), "s").once_more()
    learned = asked.for_model("m")

    assert (asked.model, learned.model, learned.session, learned.rank, learned.again) == (None, "m", "s", 1, True)
    assert learned.blocks is not None
    assert asked.for_model("m").prompt is asked.prompt


@pytest.mark.parametrize("model", [b"null", b'""', b"7", b'["m"]'])
def test_what_is_no_name_names_no_model(model):
    """The engine says what is wrong with it."""
    asked = hints_of_call(call_of(Api.CHAT, b'{"model":%s}' % model, headers=()))

    assert asked == RoutingHints()


def test_the_names_of_models_that_are_remembered_are_bounded():
    """In number and length; what is not remembered is read all the same."""
    for number in range(routing_hints._MODELS_MOST + 10):
        asked = hints_of_call(call_of(Api.CHAT, b'{"model":"m-%d"}' % number, headers=()))
        assert asked.model == f"m-{number}"
    assert routing_hints._known_model.cache_info().currsize <= routing_hints._MODELS_MOST

    looked_up = routing_hints._known_model.cache_info()
    long = "m" * 1000
    assert hints_of_call(call_of(Api.CHAT, b'{"model":"%s"}' % long.encode(), headers=())).model == long
    assert routing_hints._known_model.cache_info() == looked_up
