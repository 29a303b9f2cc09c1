"""How urgent a request is, and how urgent it may be."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.priority import limited
from pdrelay_proxy.errors import BadRequest

NAME = b"x-vllm-priority"
OTHER = (b"authorization", b"Bearer x")


def asked(header, body):
    headers = (OTHER,) if header is None else ((NAME, header.encode("latin-1")), OTHER)
    return headers, {"a": msgspec.Raw(b"1")} | ({} if body is None else {"priority": msgspec.Raw(body.encode())})


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, None, 0),
        (None, "3", 3),
        (None, "-3", -3),
        ("-1", "3", -1),  # the header wins, as in vLLM
        (" 7 ", None, 7),
        (None, "null", 0),
    ],
)
def test_priorities_are_read_as_vllm_reads_them(header, body, priority):
    """And go on as they came, where they may."""
    headers, fields = asked(header, body)
    seen = limited(headers, fields, -5)

    assert seen == (headers, fields, priority)
    assert seen[1] is fields


@pytest.mark.parametrize(("header", "body", "priority"), [("high", "3", 3), ("1.5", None, 0), ("", "2", 2)])
@pytest.mark.parametrize("odd", ["-9_9", "\xa0-9", "9" * 5000])
def test_a_header_that_is_no_number_says_nothing_to_anybody(header, body, priority, odd):
    """Python's int() reads more than we do."""
    for text in (header, odd):
        headers, fields = asked(text, body)

        assert limited(headers, fields, -5) == ((OTHER,), fields, priority)


@pytest.mark.parametrize(
    ("body", "priority"),
    [('"2"', 2), ('" -2 "', -2), ('"+2"', 2), ('"2.0"', 2), ("-1.0", -1), ("1e3", 1000), ("true", 1), ("false", 0)],
)
def test_what_pydantic_takes_for_a_whole_number_is_one(body, priority):
    """Engines get the number itself, so that no two readers differ."""
    _, fields, seen = limited(*asked(None, body), -5)

    assert (seen, bytes(fields["priority"])) == (priority, str(priority).encode())
    assert limited(*asked(None, '"-99"'), 0)[1:] == (fields | {"priority": msgspec.Raw(b"0")}, 0)


@pytest.mark.parametrize("body", ['"high"', '""', '"2.5"', '"1_0"', "2.5", "[1]", "{}", "9" * 19, "1e99", "1e16"])
def test_a_body_must_say_a_whole_number(body):
    """What it means is known before an engine has it."""
    with pytest.raises(BadRequest, match="priority must be a whole number"):
        limited(*asked(None, body), 0)


@pytest.mark.parametrize(
    ("header", "body", "least", "sees"),
    [
        ("-7", None, 0, ("0", None, 0)),
        ("-7", "-9", -5, ("-5", "-5", -5)),
        ("3", "-9", -5, ("3", "-5", 3)),
        (None, "-9", 0, (None, "0", 0)),
        ("no", "-9", 0, (None, "0", 0)),
        (None, None, 4, ("4", None, 4)),
        (None, "null", 4, ("4", "null", 4)),
        ("no", None, 4, ("4", None, 4)),
        ("2", "9", 4, ("4", "9", 4)),
    ],
)
def test_nobody_is_more_important_than_may_be(header, body, least, sees):
    """For the router and for engines."""
    headers, fields, priority = limited(*asked(header, body), least)
    shown = dict(headers)

    assert priority == sees[2]
    assert shown.get(NAME) == (None if sees[0] is None else sees[0].encode())
    assert shown[OTHER[0]] == OTHER[1]
    assert fields.get("priority") == (None if sees[1] is None else msgspec.Raw(sees[1].encode()))


TEXTS = st.one_of(st.none(), st.integers(-30, 30).map(str), st.text('-+0123456789_. \xa0\xb2e"', max_size=5))


@given(header=TEXTS, body=TEXTS, least=st.integers(-20, 20))
def test_python_reads_no_other_number_than_we_do(header, body, least):
    """What vLLM makes of what it gets: int() of the header, else the body."""
    try:
        headers, fields, priority = limited(*asked(header, body), least)
    except BadRequest:
        return
    try:
        seen = int(dict(headers)[NAME].decode("latin-1"))
    except (KeyError, ValueError):
        raw = bytes(fields.get("priority", b"null"))
        seen = 0 if raw == b"null" else int(raw)

    assert seen == priority >= least
