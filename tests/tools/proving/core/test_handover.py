"""The suite is the router: both legs are such as a router writes them."""

import json

import pytest

from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.handover import decode_body, prefill_body, push_params, read_handover, with_transfer
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.simulated import rules

QUESTIONS = [
    Question(shape, "where does it end" if shape is not Shape.IDS else (20, 21, 22), stream=stream)
    for shape in Shape
    for stream in (False, True)
]


def answer(params):
    return json.dumps({"choices": [], "kv_transfer_params": params}).encode()


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_prefill_leg_keeps_the_rules(question):
    """Those that simulated engines insist on."""
    limits = ("max_tokens", "max_completion_tokens") if question.shape is Shape.CHAT else ("max_tokens", "min_tokens")

    rules.check_prefill_leg(prefill_body(question, "m", "t1"), pushes=True, limits=limits)


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_both_legs_are_of_one_request(question):
    """Whatever shapes the prompt is the same."""
    first = prefill_body(question, "m", "t1")
    second = decode_body(question, "m", {})

    assert rules.identity(first) == rules.identity(second)


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_a_pushed_leg_says_where_the_prefill_engine_is(question):
    coordinates = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1, "tp_size": 1, "pp_size": 1}
    params = push_params(coordinates | {"dcp_size": 1}, question, "r1", "t1")

    rules.check_push_leg(decode_body(question, "m", params), "r1")


def test_pulled_params_pass_byte_for_byte():
    """They may be signed, with any order and any field of tomorrow."""
    body = b'{"kv_transfer_params": {"b": 1.50, "a": "\\u00e9"}}'

    assert bytes(with_transfer(read_handover(body), "t1")) == b'{"b": 1.50, "a": "\\u00e9"}'


def test_pushed_params_get_the_transfer():
    found = read_handover(answer({"transfer_mode": "push", "remote_host": "h", "remote_port": 5600}))

    assert with_transfer(found, "t1")["transfer_id"] == "t1"
    assert found.is_push
    assert found.coordinates() == {"remote_host": "h", "remote_port": 5600}


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", answer(None), answer({}), answer([1]), answer("x"), b"[" * 99_999])
def test_an_answer_without_params_is_malformed(body):
    with pytest.raises(Malformed):
        read_handover(body)
