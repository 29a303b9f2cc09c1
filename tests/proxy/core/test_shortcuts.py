"""What is read the quick way says what a plain reading says."""

import itertools
import json

import msgspec
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.push_coordinates import CoordinatesState, PushCoordinates
from pdrelay_proxy.core.model import Api, InstanceId
from pdrelay_proxy.core.protocol import disaggregation
from pdrelay_proxy.core.protocol.disaggregation import solo_reason
from pdrelay_proxy.core.protocol.sse import Beginning, error_status
from pdrelay_proxy.core.protocol.usage import prompt_tokens, prompt_tokens_in
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import Coordinates

# ---------------------------------------------------------------------------- events

ENDS = st.sampled_from(
    ["\n", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\n\r", "", " \t", "\x0b", "\x0c", "\x1c", "\x85"]
)
JSONS = st.sampled_from(
    [
        '{"choices":[{"text":"a"}]}',
        '{"choices":[],"usage":{"prompt_tokens":3,"total_tokens":4}}',
        '{"choices":[],"usage":{"prompt_tokens":null}}',
        '{"usage":{"input_tokens":2,"cache_read_input_tokens":5}}',
        '{"response":{"usage":{"input_tokens":9}}}',
        '{"text":"\\"usage\\":{","usage":{"prompt_tokens":8}}',
        '{"text":"\\"usage\\":{"}',
        '{"usage": {"prompt_tokens":7}}',
        '{"us\\u0061ge":{"prompt_tokens":6}}',
        '"usage":{',
        '{"usage":{"prompt_tokens":"x"}}',
        '{"usage":{"prompt_tokens":1}',
        '{"error":{"code":429}}',
        '{"error":{"code":429},"usage":{"prompt_tokens":1}}',
        '{"a":1, "error": {"code":"x"}}',
        '{"\\u0065rror":{"code":503}}',
        '{"text":"\\"error\\""}',
        '{"text":"\\u0065"}',
        '{"error":null}',
        '{"error":{}}',
        '{"error":{"code":200}}',
        '{"error":3}',
        '{"error":{"code":500.0}}',
        '{"error":{"code":true}}',
        '{"error":{"code":404}',
        "[DONE]",
        "",
        "{",
        "null",
    ]
)
FIELDS = st.sampled_from(
    [
        "data:",
        "data: ",
        "data",
        " data: ",
        "DATA: ",
        "event: response.created",
        "event:response.queued ",
        "event: response.in_progress",
        "event: message_start",
        "event: error",
        "event:",
        "id: 1",
        ": keep-alive",
        ":",
        "",
    ]
)
PIECES = st.one_of(st.tuples(FIELDS, JSONS, ENDS), st.tuples(FIELDS, st.just(""), ENDS))
STREAMS = st.lists(PIECES, max_size=6).map(lambda pieces: "".join(itertools.chain(*pieces)).encode("latin-1"))
TEXTS = st.one_of(STREAMS, st.tuples(STREAMS, st.binary(max_size=8)).map(b"".join))
PREAMBLE = {b"response.created", b"response.queued", b"response.in_progress"}


def lines_of(text):
    """Split at \\n, \\r and \\r\\n; the last line says whether it has ended."""
    lines = []
    line = bytearray()
    at = 0
    while at < len(text):
        byte = text[at : at + 1]
        at += 2 if text[at : at + 2] == b"\r\n" else 1
        if byte in b"\r\n":
            lines.append((bytes(line), True))
            line.clear()
        else:
            line += byte
    return [*lines, (bytes(line), False)] if line else lines


def plain_first_data(text):
    """Line by line: the first data whose event has no name of the preamble."""
    name = b""
    for line, is_whole in lines_of(text):
        if not is_whole:
            return None
        if line[:6] == b"event:":
            name = line[6:].strip()
        elif line[:5] == b"data:":
            if name not in PREAMBLE:
                return line[5:].strip()
            name = b""
    return None


@given(TEXTS)
@example(b"data: a\rdata: b\n")
@example(b"data: a\r\n")
@example(b"data: a")
@example(b"data:\n")
def test_the_first_event(text):
    """However its lines end."""
    assert Beginning().feed(text) == plain_first_data(text)


def plain_error_status(data):
    """Read all of it as JSON, whatever it may be; what has another shape than an error of vLLM's is none."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    if isinstance(code, bool) or not isinstance(code, int | str | None):
        return None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def escaped(text, places):
    """Write some letters of a JSON text as escapes; only those inside of strings may be."""
    return "".join(f"\\u{ord(one):04x}" if one.isalpha() and at in places else one for at, one in enumerate(text))


NAMED = st.builds(
    lambda name, places, value, before: f'{{{before}"{escaped(name, places)}": {value}}}'.encode(),
    st.sampled_from(["error", "errors", "Error", "choices"]),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from(['{"code":429}', '{"code":"429"}', "{}", "null", "1", '{"code":399}', '{"code":600}', '"error"']),
    st.sampled_from(["", '"a":"\\\\u",', '"error":null,', ' "x" : {"error":{"code":401}} ,']),
)


@given(st.one_of(NAMED, JSONS.map(str.encode), TEXTS))
@example(b'{"error":{"code":599}}')
@example(b'{"\\u0065\\u0072ror":{"code":400}}')
def test_the_status_of_an_error(data):
    """Also when its name is written in escapes; everything else is none."""
    assert error_status(data) == plain_error_status(data)


MARKS = (b'"usage":{', b'"usage": {')


def plain_prompt_tokens_in(events):
    """Line by line, if a line has the mark."""
    for line, _ in lines_of(events):
        if (
            line[:5] == b"data:"
            and any(mark in line for mark in MARKS)
            and (found := prompt_tokens(line[5:])) is not None
        ):
            return found
    return None


@given(TEXTS)
@example(b'data: {"usage":{"prompt_tokens":3}}\r')
@example(b'x\rdata: {"usage":{"prompt_tokens":3}}\n')
@example(b': "usage":{\ndata: {"usage":{"prompt_tokens":3}}\n')
@example(b'data: {"usage": {"prompt_tokens":3}}\n')
def test_the_tokens_of_a_prompt(events):
    """From the first line that says them. An engine writes its JSON in one way."""
    assume(not all(mark in events for mark in MARKS))
    assert prompt_tokens_in(events) == plain_prompt_tokens_in(events)


# ---------------------------------------------------------------------------- requests

NUMBERS = st.one_of(
    st.integers(-3, 3).map(str),
    st.integers(min_value=0).map(str),
    st.sampled_from(["-0", "0", "1.0", "1e0", "2E1", "999999999", "1000000000", "9" * 30, "1" + "0" * 400]),
)
VALUES = st.one_of(
    NUMBERS,
    NUMBERS,
    st.sampled_from(["null", "true", "false", '"2"', '"\\u0662"', '"disabled"', "[]", "[1,2]", "{}"]),
    st.sampled_from(['[{"type":"function"}]', '{"budget_tokens":1}', '{"budget_tokens":1000000000}']),
    st.just('{"include_usage":true}'),
)
NAMES = st.sampled_from(sorted({name for api in Api for name in disaggregation._RELEVANT[api]} | {"temperature"}))


def plain_value(raw):
    try:
        return decode(bytes(raw), object)
    except NotJson:
        return "?"


def plain_reason(api, fields):
    """Each field of the table, one after the other; every value is decoded."""
    values = {name: plain_value(raw) for name, raw in fields.items()}
    if api is Api.GENERATE and isinstance(values.get("sampling_params"), dict):
        values |= {f"sampling_params.{name}": value for name, value in values["sampling_params"].items()}
    table = disaggregation._PLAIN[api]
    odd = {reason for name, (is_plain, reason) in table.items() if name in values and not is_plain(values[name])}
    for _, reason in table.values():
        if reason in odd:
            return reason
    return None if disaggregation._FIT[api](values) else disaggregation.SingleEngineReason.UNUSUAL


@given(st.sampled_from(Api), st.dictionaries(NAMES, VALUES, max_size=4))
@example(Api.CHAT, {"max_tokens": "9" * 30})  # far more than a machine word
@example(Api.MESSAGES, {"max_tokens": "1000000000", "thinking": '{"budget_tokens":999999999}'})
@example(Api.MESSAGES, {"max_tokens": "999999999", "thinking": '{"budget_tokens":1000000000}'})
def test_why_a_request_is_served_by_one_engine(api, texts):
    """Whatever numbers it has."""
    body = "{" + ", ".join(f"{json.dumps(name)} : {text} " for name, text in texts.items()) + "}"
    fields = decode(body.encode(), dict[str, msgspec.Raw])

    assert solo_reason(api, fields) == plain_reason(api, fields)


# ---------------------------------------------------------------------------- engines that push

NAMED_ENGINES = [InstanceId(f"prefill-{number}") for number in range(3)]
FOUND = st.one_of(
    st.none(),
    st.sampled_from("xyz").map(
        lambda name: Coordinates(remote_engine_id=name, remote_host="h", remote_port=1, tp_size=1)
    ),
)
LESSONS = st.tuples(st.sampled_from(NAMED_ENGINES), st.one_of(FOUND, FOUND, st.just("forget"), st.just("look")))


@given(st.booleans(), st.lists(LESSONS, max_size=25))
def test_whether_a_prefill_engine_pushes(at_once, lessons):
    """As long as the place of one of them is known, and no longer."""
    learned = PushCoordinates(at_once=at_once)
    for engine, lesson in lessons:
        if lesson == "forget":
            learned.forget(engine)
        elif lesson == "look":
            learned.coordinates(engine)
        else:
            learned.learn(engine, lesson)
        told = {each for each in NAMED_ENGINES if learned.coordinates(each) is not None}
        assert told == {each for each in NAMED_ENGINES if at_once and learned.state(each) is CoordinatesState.PUSH}
