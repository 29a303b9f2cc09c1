"""How many things a body may be made of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.http.json_bounds import (
    ALL_NAMES_MOST,
    INNER_NAMES_MOST,
    NAMES_MOST,
    OBJECTS_MOST,
    PROMPTS_MOST,
    STRINGS_MOST,
    check_names,
    check_prompts,
    count_items,
)
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.errors import BadRequest

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text('"\\,:[]{}\u20ac a', max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('"\\:,]}', max_size=3), inner)),
    max_leaves=12,
)


@given(items=st.lists(VALUES, max_size=8), most=st.integers(1, 9), indent=st.sampled_from([None, 1]))
def test_items_are_counted_as_json_counts_them(items, most, indent):
    """Whatever stands in their texts."""
    assert count_items(json.dumps(items, indent=indent).encode(), most) == min(len(items), most + 1)


def many(count):
    return {f'"\\{number}"': 1 for number in range(count)}


def tools(count, fields):
    """Return tools as agents send them: each field has a type and a description."""
    field = {"type": "string", "description": 'what "it": is', "enum": ["a", "b"]}
    parameters = {"type": "object", "properties": {f"f{number}": field for number in range(fields)}, "required": []}
    return [
        {"type": "function", "function": {"name": f"t{number}", "parameters": parameters}} for number in range(count)
    ]


@pytest.mark.parametrize(
    "body",
    [
        many(NAMES_MOST),
        {"a": [many(NAMES_MOST), many(NAMES_MOST)], **many(NAMES_MOST - 1)},
        {"a": ":" * 3 * ALL_NAMES_MOST},
        {"a": '{"b": "c",' * ALL_NAMES_MOST},
        {"a": ":", "b": [{"role": "user", "content": '"x":' * 9}] * (ALL_NAMES_MOST // 2 - 1)},
        {"a": many(INNER_NAMES_MOST), "b": many(INNER_NAMES_MOST)},
        {"logit_bias": {str(token): -1 for token in range(5000)}},
        {"sampling_params": {"logit_bias": {str(token): -1 for token in range(5000)}}},
        {"tools": tools(600, 40)},
        {"tools": tools(600, 40), "logit_bias": {str(token): -1 for token in range(5000)}, **many(100)},
    ],
)
def test_as_many_names_as_may_be(body):
    """Those in texts are none; and vLLM has no limit for the bias of tokens and for tools."""
    check_names(json.dumps(body).encode())


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("body", "what"),
    [
        (many(NAMES_MOST + 1), "the body itself"),
        ({"x" * 200_000: 1, **many(NAMES_MOST)}, "the body itself"),
        ({"a": [{}, many(5000)], "b": "}", **many(NAMES_MOST - 1)}, "the body itself"),
        ({"a": [1, {"b": many(INNER_NAMES_MOST + 1)}]}, "an object"),
        ({"a": [{"b": "", "c": ""}] * (ALL_NAMES_MOST // 2)}, "names"),
        ({"a": [{}] * (OBJECTS_MOST), "b": many(5000)}, "objects"),
        ({"a": [""] * (STRINGS_MOST), "b": many(5000)}, "strings"),
    ],
)
def test_more_names_are_refused(body, what, indent):
    """Each is read, here or in an engine."""
    with pytest.raises(BadRequest, match=f"{what}.*at most"):
        check_names(json.dumps(body, indent=indent).encode())


@pytest.mark.parametrize("text", [b'"' * 100_000, b"{" * 100_000, b"}" * 100_000, b'{"a\\' * 5000, b":" * 100_000])
def test_what_is_no_json_is_left_to_who_reads_it(text):
    """And costs no more than what is."""
    check_names(text + b":" * NAMES_MOST)


def test_prompts_are_counted():
    """Texts and lists of token ids; one list of ids is one prompt."""
    for name in ("prompt", "input", "documents"):
        for item in ("a,b", [1, 2], {"text": "a"}):
            just = json.dumps({name: [item] * PROMPTS_MOST}).encode()
            assert parse(just)
            with pytest.raises(BadRequest, match=f"{name} has more than {PROMPTS_MOST}"):
                parse(json.dumps({name: [item] * (PROMPTS_MOST + 1)}).encode())
    assert parse(json.dumps({"prompt": [7] * 100_000}).encode())
    check_prompts({}, 1 << 20)
