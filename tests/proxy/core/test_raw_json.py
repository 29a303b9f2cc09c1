"""JSON that is read only as far as it must be."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.raw_json import Fields, NotJson, OtherJson, decode, encode, encode_in_pieces


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


VALUES = st.sampled_from([b"1", b'"x"', b'"%b"' % (b"long " * 4000), b"[%b]" % b",".join([b"1"] * 9000), b"null"])
NAMES = st.sampled_from(["prompt", "messages", 'a "quoted" name', "\u00e9", "stream"])


@given(fields=st.dictionaries(NAMES, VALUES.map(msgspec.Raw), max_size=5), last=NAMES)
def test_pieces_are_the_same_object(fields, last):
    """Every value as it was read; a long one at the end and not copied."""
    pieces = encode_in_pieces(fields, last)
    written = b"".join(pieces)

    assert decode(written, Fields) == fields
    if len(bytes(fields.get(last, b""))) > 10_000:
        assert [isinstance(piece, memoryview) for piece in pieces] == [False, True, False]
        assert pieces[1].obj is not written
        assert list(decode(written, Fields))[-1] == last
    else:
        assert pieces == [encode(fields)]
