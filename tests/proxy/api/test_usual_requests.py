"""A request that is read by one pattern means what llhttp makes of it."""

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xpyd_proxy.api import usual
from xpyd_proxy.api.usual import usual_request

PATHS = {b"/v1/completions": "/v1/completions", b"/v1/chat/completions": "/v1/chat/completions"}
BODY = b'{"prompt": "a"}'
LINES = st.sampled_from(
    [
        b"host: router:8000",
        b"user-agent: OpenAI/Python 2.25.0",
        b"Accept: */*",
        b"Content-Type: application/json",
        b"authorization: Bearer sk-123",
        b"x-request-id: a b",
        b"Connection: keep-alive",
        b"connection: Keep-Alive",
    ]
)
ODD_LINES = st.sampled_from(
    [
        b"host:router",
        b"host:  router",
        b"host: router ",
        b"host: a\tb",
        b"host: \xff",
        b"host: a\rb",
        b"host: a\nb",
        b"host: a\0",
        b" host: folded",
        b"host : spaced",
        b"h\xf6st: a",
        b"host",
        b": a",
        b"host:",
        b"content-length: 2",
        b"content-length: 15, 15",
        b"Transfer-Encoding: chunked",
        b"transfer-encoding: identity",
        b"connection: close",
        b"connection: keep-alive, upgrade",
        b"Upgrade: websocket",
        b"Expect: 100-continue",
        b"TE: trailers",
        b"x-long: " + b"r" * 5000,
        b"",
    ]
)
LENGTHS = [b"%d", b"0%d", b"000000000%d", b"+%d", b"%d ", b" %d", b"0x%d", b"%d,%d", b"-%d", b"", b"1"]
FIRST = [b"POST /v1/completions HTTP/1.1"] * 6 + [
    b"POST /v1/chat/completions HTTP/1.1",
    b"POST /v1/models HTTP/1.1",
    b"POST /v1/completions?a=b HTTP/1.1",
    b"GET /v1/completions HTTP/1.1",
    b"POST /v1/completions HTTP/1.0",
    b"POST  /v1/completions HTTP/1.1",
    b"POST /v1/completions  HTTP/1.1",
    b"post /v1/completions HTTP/1.1",
]


@st.composite
def requests(draw):
    """What a client may send: nearly always in good order, and then something is odd."""
    length = draw(st.one_of(st.just(b"%d"), st.sampled_from(LENGTHS)))
    counted = draw(st.sampled_from([b"content-length: ", b"Content-Length: "])) + length.replace(b"%d", b"15")
    lines = draw(st.lists(LINES, max_size=4, unique=True)) + draw(st.lists(ODD_LINES, max_size=1))
    lines = draw(st.permutations([*lines, *draw(st.sampled_from([[counted]] * 8 + [[], [counted, counted]]))]))
    said = b"\r\n".join([draw(st.sampled_from(FIRST)), *lines, b"", BODY])
    return draw(st.sampled_from([b"", b"", b"", b"\r\n"])) + said + draw(st.sampled_from([b"", b"", b"", b"x", said]))


class Parsed:
    """What the parser makes of a request."""

    def __init__(self, received):
        self.url, self.headers, self.body, self.messages, self.expects = b"", [], b"", 0, False
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(received)
        self.told = parser.get_method(), parser.get_http_version(), parser.should_keep_alive(), parser.should_upgrade()

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))
        self.expects = self.expects or (name.lower() == b"expect" and value.lower() == b"100-continue")

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.messages += 1


@settings(max_examples=1000)
@given(received=requests())
@example(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
def test_what_is_taken_means_what_the_parser_makes_of_it(received):
    taken = usual_request(received, PATHS)

    if taken is not None:
        path, headers, body = taken
        parsed = Parsed(received)
        assert (parsed.url, parsed.headers, parsed.body) == (path.encode(), headers, body)
        assert (parsed.messages, parsed.expects) == (1, False)
        assert parsed.told == (b"POST", "1.1", True, False)


@pytest.mark.parametrize(
    "lines",
    [
        [b"Host: localhost:8000", b"User-Agent: curl/8.5.0", b"Accept: */*", b"Content-Type: application/json"],
        [b"host: a", b"connection: keep-alive", b"authorization: Bearer key", b"x-stainless-lang: python"],
    ],
)
def test_what_clients_send_is_taken(lines):
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", *lines, b"Content-Length: %d" % len(BODY), b"", b""])

    path, headers, body = usual_request(head + BODY, PATHS)

    assert (path, body) == ("/v1/completions", BODY)
    assert headers[0] == (b"host", lines[0].partition(b": ")[2])
    assert usual_request(head + BODY[:-1], PATHS) is None
    assert usual_request(head + BODY + b" ", PATHS) is None


def test_what_is_long_is_left_to_the_parser():
    """A long body is looked at before it has been read to its end."""
    body = b" " * (64 << 10)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-length: %d\r\n\r\n" % len(body)

    assert usual_request(head + body, PATHS) is None


def test_lines_are_remembered_as_they_were_said_and_not_without_end():
    """Clients can think of other lines without end, and of long ones."""
    for number in [*range(2 * usual._KNOWN_MOST), 7, 7]:
        head = b"POST /v1/completions HTTP/1.1\r\nUser-Agent: %d\r\nHost: x\r\ncontent-length: 15\r\n\r\n" % number
        assert usual_request(head + BODY, PATHS)[1][0] == (b"user-agent", b"%d" % number)
    assert b"User-Agent: 7" in usual._KNOWN
    assert len(usual._KNOWN) <= usual._KNOWN_MOST

    long = b"user-agent: " + b"r" * 1000
    assert usual_request(b"POST /v1/completions HTTP/1.1\r\n%b\r\nHost: x\r\ncontent-length: 0\r\n\r\n" % long, PATHS)
    assert long not in usual._KNOWN


@pytest.mark.parametrize("line", [b"Authorization: Bearer secret", b"x-api-key: secret", b"cookie: a=secret"])
def test_nothing_private_is_remembered(line):
    """A key that is taken back, or a client that was never let in, leaves nothing behind."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\ncontent-length: 15\r\n\r\n" % line

    assert usual_request(head + BODY, PATHS)[1][1][1].endswith(b"secret")
    assert b"host: a" in usual._KNOWN
    assert not any(b"secret" in known for known in usual._KNOWN)
