"""JSON that is read only as far as it must be."""

import pytest

from xpyd_proxy.core.raw_json import Fields, NotJson, OtherJson, decode, encode


def test_values_are_written_as_they_were_read():
    """Also those that Python would write in another way."""
    text = b'{"a":1e400,"b":0.10,"c":[1 , 2],"d":"\\u00e9","e":123456789012345678901234567890}'

    assert text == encode(decode(text, Fields))


@pytest.mark.parametrize("text", [b"[]", b"null", b"1", b'"x"'])
def test_json_of_another_type_is_told_apart(text):
    """A client deserves to know which of the two mistakes it made."""
    with pytest.raises(OtherJson):
        decode(text, Fields)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"{}x", b'{"a":01}', b'{"a":NaN}', b'{"\xff":1}', b'{"a":' + b"[" * 100_000]
)
def test_what_is_not_json_is_one_kind_of_error(text):
    """However the library puts it: a decode error, a bad encoding, or a recursion without end."""
    with pytest.raises(NotJson) as caught:
        decode(text, Fields)

    assert type(caught.value) is NotJson
