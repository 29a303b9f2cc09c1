"""Which header or field names the session of a request."""

import json

import pytest

from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.routing.session_ids import BODY_FIELDS, HEADERS, LONGEST, SessionIds


def session(body, headers=(), names=()):
    return SessionIds(names).of(dict(headers), parse(json.dumps(body).encode()))


def nested(name, value):
    field, _, inner = name.partition(".")
    return {field: {inner: value} if inner else value}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_known_clients(name):
    assert session({}, {name.encode(): b"s-1"}) == "s-1"


@pytest.mark.parametrize("name", BODY_FIELDS)
def test_fields_of_known_clients(name):
    assert session(nested(name, "s-1")) == "s-1"


def test_headers_count_before_fields_and_the_first_of_each():
    """One conversation, one engine, whichever of its names a client sends, too."""
    headers = {name.encode(): name.encode() for name in reversed(HEADERS)}
    body = {"user": "u", "metadata": {"user_id": "m"}, "prompt_cache_key": "k"}

    assert session(body, headers) == HEADERS[0]
    assert session(body) == "k"
    assert session({"user": "u", "metadata": {"user_id": "m"}}) == "m"


def test_an_operators_names_come_first():
    names = ("X-Task-Id", "body:conversation_id", "body:metadata.thread")

    assert session({}, {b"x-task-id": b"t", b"x-session-id": b"s"}, names) == "t"
    assert session({"conversation_id": "c", "user": "u"}, (), names) == "c"
    assert session({"metadata": {"thread": "t", "user_id": "m"}}, (), names) == "t"


@pytest.mark.parametrize("value", ["", None, 7, ["s"], {"a": "s"}, "x" * LONGEST])
def test_what_is_no_short_string_names_no_session(value):
    """And the next name is looked at; a long one would be hashed for every request."""
    for name in BODY_FIELDS[:-1]:
        assert session(nested(name, value)) is None
        assert session(nested(name, value) | {"user": "u"}) == "u"


@pytest.mark.parametrize("value", ["s", 7, None, ["user_id"]])
def test_metadata_that_is_no_object(value):
    assert session({"metadata": value}) is None


@pytest.mark.parametrize("value", [b"", b"x" * (LONGEST + 1)])
def test_a_header_that_is_empty_or_too_long_names_none(value):
    assert session({"user": "u"}, {b"x-session-id": value}) == "u"
