"""What of an engine's answer may reach a client."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.protocol.response_filter import check_type, clean_answer, clean_lines, is_stream
from pdrelay_proxy.errors import AnswerRefused, EngineError

JSON = b"application/json"
NAME = "kv_transfer_params"


@pytest.mark.parametrize(
    "content_type",
    [
        *(b"application/json", b"application/json; charset=utf-8", b"Text/Event-Stream; charset=utf-8"),
        *(b"audio/wav", b"audio/x-aac", b"text/plain; charset=utf-8", b"application/octet-stream"),
    ],
)
def test_content_types_that_are_passed_on(content_type):
    """Those that vLLM has for what clients ask for."""
    check_type("decode-0", content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        *(b"", b"text/html", b"text/html; application/json", b"application/jsonp", b"image/svg+xml", b"audio/"),
        *(b"application/json, text/html", b"application/json;x=,text/html", b"application/json\r\nx: y", b"x"),
        *(b"text/xml", b"application/javascript", b"application/xhtml+xml", b"multipart/x-mixed-replace"),
    ],
)
def test_other_content_types_are_not(content_type):
    """A browser would show such an answer as a page of the router's, or run it."""
    with pytest.raises(EngineError, match=r"decode-0 answered with the content type .*, which is not passed on"):
        check_type("decode-0", content_type)


def test_streams_are_told_by_their_type():
    """All of it."""
    assert is_stream(b"Text/Event-Stream ; charset=utf-8")
    assert not is_stream(b"text/event-streams")


SECRET = {"remote_host": "10.0.0.1", "remote_block_ids": [1]}
INNER = st.recursive(
    st.one_of(
        st.none(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(f"{NAME[0]}\\u\"'", max_size=4),
        st.just(NAME),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=2), st.just(NAME)), inner, max_size=3),
    ),
    max_leaves=8,
)


def without(value):
    match value:
        case dict():
            return {name: without(inner) for name, inner in value.items() if name != NAME}
        case list():
            return [without(inner) for inner in value]
    return value


def names_in(value):
    match value:
        case dict():
            return {*value, *(name for inner in value.values() for name in names_in(inner))}
        case list():
            return {name for inner in value for name in names_in(inner)}
    return set()


@pytest.mark.parametrize("depth", [1, 31, 33, 40, 500, 5000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "behind"), [(b'{"a":', b"}"), (b"[ ", b"]"), (b'[1,{"b":"x","a":', b',"c":[]}]')])
def test_they_are_taken_out_at_any_depth(depth, before, behind):
    """A tool's schema may be nested as deep as a client likes, and an answer repeats it."""
    inner = b'{"kv_transfer_params":{"a":[1,{}]},"b":1.50,"kv_transfer_params" : [] }'
    text = before * depth + inner + behind * depth
    got = clean_answer("d", JSON, text)

    assert got.replace(b" ", b"") == (before * depth + b'{"b":1.50}' + behind * depth).replace(b" ", b"")
    assert clean_lines("d", b'data: {"x":' + text + b"}\n") == b'data: {"x":' + got + b"}\n"


@given(value=st.dictionaries(st.text(max_size=2), INNER, max_size=4), secret=st.booleans(), line=st.booleans())
def test_parameters_are_taken_out_wherever_they_are(value, secret, line):
    """All else stays; a text that names them is no parameter."""
    if secret:
        value[NAME] = SECRET
    text = json.dumps(value, separators=(",", ":")).encode()
    got = clean_lines("d", b"data: " + text + b"\n\n")[6:].strip() if line else clean_answer("d", JSON, text)

    assert without(json.loads(got)) == without(value)
    assert json.loads(got).get(NAME) is None
    assert NAME.encode() in text or got == text


@pytest.mark.parametrize(
    "text",
    [
        b'{"kv_transfer_params":{"a":1},"b":1.50}',
        b'{"kv\\u005ftransfer_params":{"a":1},"b":1.50}',
        b'{"\\u006bv_transfer_params":{"a":1},"b":1.50}',
        b'{"kv_transfer_para\\u006Ds":{"a":1},"b":1.50}',
        b'{"kv_transfer_params" : {"a":1}, "b": 1.50}',
        b'{"kv_transfer_params":{"a":1},"kv_transfer_params":null,"b":1.50}',
    ],
)
def test_however_their_name_is_written(text):
    """And numbers stay as they were written, whatever a float would make of them."""
    compact = text.replace(b" ", b"")

    assert clean_answer("d", JSON, compact) == b'{"b":1.50}'
    assert clean_lines("d", b"data: " + compact + b"\r\n") == b'data: {"b":1.50}\n'
    assert clean_answer("d", JSON, text).replace(b" ", b"") == b'{"b":1.50}'


def test_an_earlier_value_of_a_name_that_occurs_twice_has_none_either():
    """Some parsers take the first."""
    text = b'{"a":{"kv_transfer_params":{"b":1}},"a":2}'

    assert clean_answer("d", JSON, text) == b'{"a":{},"a":2}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"kv_transfer_params":1,"kv_transfer_params":[{"kv_transfer_params":2}],"b":3}', b'{"b":3}'),
        (b'{"b":3,"kv_transfer_params":"}","kv_transfer_params":{"x":"\\"]"}}', b'{"b":3}'),
        (b'{"b":{"kv_transfer_params":1},"c":[{"kv_transfer_params":1,"d":2}]}', b'{"b":{},"c":[{"d":2}]}'),
        (b'{ "b" : 3 , "kv_transfer_params" : 1 }', b'{ "b" : 3  }'),
        (b'{"b":"kv_transfer_params","kv_transfer_params":"kv_transfer_params"}', b'{"b":"kv_transfer_params"}'),
        (b'{"b\\"kv_transfer_params":1}', b'{"b\\"kv_transfer_params":1}'),
        (b'{"b":"\\\\","kv_transfer_params":"\xc3\xa9"}', b'{"b":"\\\\"}'),
        (b'{"b":"\\\\u006b","kv_transfer_params":1}', b'{"b":"\\\\u006b"}'),
        (b'{"b":1,"kv_transfer_params":' + b"9" * 5000 + b"}", b'{"b":1}'),
    ],
)
def test_only_whole_members_are_taken_out(text, expected):
    """With one comma each; texts that have the name, or end like it, stay."""
    assert clean_answer("d", JSON, text) == expected


@pytest.mark.parametrize("mark", [b'"kv_transfer_params"', b'{"kv_transfer_params":1}', b'"\\\\u006b"'])
@pytest.mark.parametrize("depth", [1, 40])
def test_what_a_client_has_repeated_takes_milliseconds_to_look_through(mark, depth):
    """/v1/responses repeats a request's tools, three times in a stream: 2 MB of them took two seconds each time."""
    text = b'{"a":' * depth + b"[" + b"0," * 1_000_000 + mark + b"]" + b"}" * depth
    began = time.process_time()

    clean_lines("d", b"data: " + text + b"\n")

    assert time.process_time() - began < 0.2


def test_what_says_nothing_of_them_stays_to_the_byte():
    """Null says nothing, and is in all answers of vLLM."""
    for text in (b'{"a" : 1.50,"kv_transfer_params":null}', b"[ ]", b"not JSON", b'{"a":"\\u00e9\\u001f"}'):
        assert clean_answer("d", JSON, text) is text
        assert clean_lines("d", b"data: " + text + b"\n") == b"data: " + text + b"\n"
    audio = b"RIFF kv_transfer_params"
    assert clean_answer("d", b"audio/wav", audio) is audio


@pytest.mark.parametrize(
    "lines",
    [
        b": kv_transfer_params\n",
        b"event: kv_transfer_params\n",
        b'\xef\xbb\xbfdata: {"kv_transfer_params":{}}\n',
        b': x\rdata: {"kv_transfer_params":{}}\n',
        b'data: {"a":1}\rdata: {"kv_transfer_params":{}}\n',
        b'data: {"a":1,\ndata: "kv_transfer_params":\ndata: {"b":1}}\n',
        b'data: {\ndata: "kv_transfer_params"\ndata: :1}\n',
        b'data: {"kv_transfer_params":{}\n',
        b"data: " + b'{"a":' * 99 + b'{"kv_transfer_params":{}' + b"}" * 99 + b"\n",
    ],
)
def test_where_they_cannot_be_taken_out_the_stream_ends(lines):
    """Clients join the lines of an event, and take a lone CR for the end of a line."""
    with pytest.raises(AnswerRefused, match="d sent kv_transfer_params in a line"):
        clean_lines("d", lines)


def test_an_answer_that_may_have_them_must_be_json():
    """Or nobody knows what a lenient parser finds in it."""
    with pytest.raises(AnswerRefused, match="d answered with kv_transfer_params"):
        clean_answer("d", JSON, b'{"kv_transfer_params":{}')
