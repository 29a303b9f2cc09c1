"""How many things a body may be made of."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.http.json_bounds import (
    ALL_NAMES_MOST,
    NAMES_MOST,
    PROMPTS_MOST,
    check_names,
    check_prompts,
    count_items,
)
from xpyd_proxy.core.protocol.request_bodies import parse
from xpyd_proxy.errors import BadRequest

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


@pytest.mark.parametrize(
    "body",
    [
        many(NAMES_MOST),
        {"a": [many(NAMES_MOST), many(NAMES_MOST)], **many(NAMES_MOST - 1)},
        {"a": ":" * 3 * ALL_NAMES_MOST},
        {"a": '{"b": "c",' * ALL_NAMES_MOST},
        {"a": ":", "b": [{"role": "user", "content": '"x":' * 9}] * (ALL_NAMES_MOST // 2 - 1)},
    ],
)
def test_as_many_names_as_may_be(body):
    """Those in texts are none."""
    check_names(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (many(NAMES_MOST + 1), "an object"),
        ({"a": [1, {"b": many(NAMES_MOST + 1)}]}, "an object"),
        ({"a": [{"b": ""}] * (ALL_NAMES_MOST)}, "names"),
        ({"a": [""] * 400_000, "b": ":" * 5000}, "strings"),
    ],
)
def test_more_names_are_refused(body, what):
    """Each is read, here or in an engine."""
    with pytest.raises(BadRequest, match=what):
        check_names(json.dumps(body).encode())


@pytest.mark.parametrize("text", [b'"' * 100_000, b"{" * 100_000, b"}" * 100_000, b'{"a\\' * 5000, b":" * 100_000])
def test_what_is_no_json_is_left_to_who_reads_it(text):
    """And costs no more than what is."""
    check_names(text + b":" * NAMES_MOST)


def test_prompts_are_counted():
    """Texts and lists of token ids; one list of ids is one prompt."""
    for name in ("prompt", "input", "documents"):
        for item in ("a,b", [1, 2], {"text": "a"}):
            just = json.dumps({name: [item] * PROMPTS_MOST}).encode()
            assert parse(just, strip_private=False)
            with pytest.raises(BadRequest, match=f"{name} has more than {PROMPTS_MOST}"):
                parse(json.dumps({name: [item] * (PROMPTS_MOST + 1)}).encode(), strip_private=False)
    assert parse(json.dumps({"prompt": [7] * 100_000}).encode(), strip_private=False)
    check_prompts({}, 1 << 20)
