"""A head that repeats the one before means what it would mean on its own connection."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrelay_proxy.core.http.framing import Head, read_head
from pdrelay_proxy.core.http.repeated_head import RepeatedHead
from pdrelay_proxy.errors import ClientError

NAMES = Head.__mypyc_attrs__ if hasattr(Head, "__mypyc_attrs__") else Head.__slots__  # a compiled class has no slots
LINES = st.lists(
    st.sampled_from([
        b"Host: x", b"host: y", b"Content-Type: application/json", b"Connection: close", b"Expect: 100-continue",
        b"Upgrade: h2c", b"Transfer-Encoding: chunked", b"X-Length: 12", b"X-12: Content-Length: 12", b"Odd",
        b"A: b\tc ",
    ]),
    max_size=4,
)  # fmt: skip
LENGTHS = st.sampled_from([b"12", b"7", b"007", b"", b" 12 ", b"+1", b"1_0", b"1" * 16, b"1\r\nHost: z", b"1\r\n\r\nx"])


@st.composite
def heads(draw):
    """Yield heads of one client, which repeats its lines; some are odd, and some must be refused."""
    lines, name = draw(LINES), draw(st.sampled_from([b"Content-Length:", b"content-length: ", b"CONTENT-LENGTH:\t"]))
    before, behind = draw(st.booleans()), draw(LINES)
    first = draw(st.sampled_from([b"POST / HTTP/1.1", b"POST /12 HTTP/1.0", b"GET / HTTP/1.1", b"nothing"]))
    found = []
    for length in draw(st.lists(LENGTHS, min_size=1, max_size=4)):
        counted = [] if not length and draw(st.booleans()) else [name + length]
        found.append(b"\r\n".join([first, *([b"Host: x"] if before else []), *lines, *counted, *behind, b"", b""]))
    return found


def meaning(read, raw):
    try:
        head = read(raw)
    except ClientError as error:
        return type(error), str(error)
    return [getattr(head, name) for name in NAMES]


LONG = [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %b\r\n\r\n" % length for length in (b"12345", b"", b"1", b"12")]


@given(st.lists(heads(), min_size=1, max_size=3))
@example([LONG])
def test_a_head_means_the_same_behind_any_other(clients):
    """Also one that is refused, and one behind that: an error of this would be a request smuggled in."""
    every = [raw for client in clients for raw in client]

    connection = RepeatedHead()

    assert [meaning(connection.read, raw) for raw in every] == [meaning(read_head, raw) for raw in every]


def test_a_head_that_repeats_is_not_read_again():
    """Reading one takes as long as choosing both engines."""
    raw = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nA: b\r\n\r\n"
    connection = RepeatedHead()

    first, second = connection.read(raw % 5), connection.read(raw % 1234)

    assert second.headers[0] is first.headers[0]
    assert (second.length, second.shown[b"content-length"], second.headers[1]) == (
        1234, b"1234", (b"content-length", b"1234"),
    )  # fmt: skip
    assert first.length == 5, "the head before has changed"


@pytest.mark.parametrize("more", [b"A: " + b"a" * 2048 + b"\r\n", b"A: b\r\n" * 48, b"Upgrade: h2c\r\n"])
def test_what_a_connection_keeps_is_bounded(more):
    """A connection may be idle for long, and there are thousands of them."""
    raw = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + more + b"\r\n"
    connection = RepeatedHead()

    first, second = connection.read(raw), connection.read(raw)

    assert first.headers[0] == second.headers[0]
    assert first.headers[0] is not second.headers[0]
