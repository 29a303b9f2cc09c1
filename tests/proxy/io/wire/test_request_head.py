"""The head of a request that goes the short way is that of any other."""

import itertools

import h11
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.io.wire.request_head import Heads, Unsendable

ADDRESSES = [Address("http", "h", 80), Address("http", "10.0.0.1", 8000), Address("https", "h.example", 443)]
JSON = (b"content-type", b"application/json")
NAMES = st.sampled_from([b"authorization", b"x-session-id", b"traceparent", b"X-Data-Parallel-Rank", b"a"])
ODD_NAMES = st.sampled_from([b"host", b"Content-Length", b"transfer-encoding", b"te", b"a b", b"a:", b"", b"a\r\nb"])
VALUES = st.one_of(
    st.sampled_from([b"", b"Bearer k", b"\xff\x80", b"a\tb", b"GET / HTTP/1.1"]),
    st.binary(max_size=6),
    st.text("ab \t\r\n\0\x7f", max_size=6).map(str.encode),
)
HEADERS = st.lists(st.tuples(st.one_of(NAMES, NAMES, NAMES, ODD_NAMES), VALUES), max_size=4).map(tuple)


def made(head, *args):
    """Return a head; None: it was refused."""
    try:
        return head(*args)
    except Unsendable:
        return None


def parsed(head):
    """Read a head as an engine does: its first line, and its headers in order within a name."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(head)
    event = server.next_event()
    assert isinstance(event, h11.Request)
    return (event.method, event.target), sorted(event.headers, key=lambda header: header[0])


@given(
    st.sampled_from(ADDRESSES),
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/a b", "/\r\n", ""]),
    st.lists(HEADERS, min_size=1, max_size=4),
    st.integers(0, 2**40),
)
def test_both_ways_send_the_same(address, path, all_headers, length):
    """And refuse the same, the second time too."""
    heads = Heads(address)
    for headers in [*all_headers, *all_headers]:
        ours = made(heads.post_ours, path, headers, "r-1", length)
        any_other = made(Heads(address).post, path, (*headers, (b"x-request-id", b"r-1"), JSON), length)

        assert (ours is None) == (any_other is None)
        if ours is not None:
            assert ours.count(b"\r\n\r\n") == 1
            assert ours.endswith(b"\r\n\r\n")
            assert parsed(ours) == parsed(any_other)


def test_what_is_kept_is_bounded():
    """Clients can show keys without end."""
    heads = Heads(ADDRESSES[0])
    for number, path in zip(range(300), itertools.cycle(["/a", "/b"])):
        headers = ((b"authorization", b"Bearer %d" % number),)
        for _ in range(2):
            head = heads.post_ours(path, headers, "r", number)
            assert b"authorization: Bearer %d\r\n" % number in head
            assert b"content-length: %d\r\n" % number in head
    for number in range(300):
        heads.post_ours(f"/{number}", (), "r", 0)

    assert 0 < len(heads._known) <= 64
    assert 0 < len(heads._beginnings) <= 64
