"""JSON without the members of one name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.protocol.object_scan import without_name
from pdrelay_proxy.core.raw_json import NotJson

TEXTS = st.text(st.characters(max_codepoint=0x2FFF))  # a name with half a surrogate pair is refused
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(TEXTS, st.just("x")), inner, max_size=4)
    ),
    max_leaves=20,
)


def without(value):
    match value:
        case dict():
            return {name: without(inner) for name, inner in value.items() if name != "x"}
        case list():
            return [without(inner) for inner in value]
    return value


@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_all_else_stays(value, indent, is_ascii):
    """However it is written."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode()

    assert json.loads(without_name(text, "x")) == without(value)


@given(value=VALUES, data=st.data())
def test_what_is_no_json_is_refused_and_what_is_passes(value, data):
    """One byte more, or one less: the same judgement as another parser's."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from(["", *'{}[]:,"1-.e '])) + text[at + data.draw(st.integers(0, 1)) :]
    try:
        right = without(json.loads(text))
    except json.JSONDecodeError:
        with pytest.raises(NotJson):
            without_name(text.encode(), "x")
    else:
        assert without(json.loads(without_name(text.encode(), "x"))) == right


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (b'{"x":1}', b"{}"),
        (b'{"x":1,"a":2}', b'{"a":2}'),
        (b'{"a":2,"x":1}', b'{"a":2}'),
        (b'{"a":2,"x":{"a":{"x":1}},"b":[{"x":[]},3]}', b'{"a":2,"b":[{},3]}'),
        (b'{"\\u0078":1,"a":1.50}', b'{"a":1.50}'),
        (b' "x" ', b'"x"'),
    ],
)
def test_members_are_cut_with_their_comma(text, kept):
    """Wherever they stand."""
    assert without_name(text, "x") == kept
