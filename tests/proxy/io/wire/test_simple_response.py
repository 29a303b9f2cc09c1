"""An answer that is read by one pattern means what llhttp makes of it."""

import asyncio
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.io.wire.connection import Connection, Peer
from pdrelay_proxy.io.wire.simple_response import SimpleResponses, parse_single_chunk
from support.wiring import Told

LINES = st.sampled_from(
    [
        b"date: Sun, 22 Nov 2026 01:02:03 GMT",
        b"server: uvicorn",
        b"x-request-id: cmpl-1",
        b"content-type: application/json",
    ]
)
ODD_LINES = st.sampled_from(
    [
        b"Date: now",
        b"server:uvicorn",
        b"server: a\tb",
        b"server: \xff",
        b"server: a\rb",
        b"server: a\nb",
        b"server: a\0",
        b" server: folded",
        b"server : spaced",
        b"content-type: text/plain",
        b"Content-Type: application/json",
        b"content-length: 2",
        b"content-length: 0",
        b"content-length: 99999999999",
        b"transfer-encoding: chunked",
        b"content-encoding: gzip",
        b"connection: close",
        b"connection: upgrade",
        b"endpoint-load-metrics: JSON {}",
        b"x-request-id: " + b"r" * 5000,
        b"",
    ]
)
LENGTHS = st.sampled_from([b"%d", b"0%d", b"000000000%d", b"+%d", b"%d ", b" %d", b"0x%d", b"%d,%d", b"-%d"])
BODIES = st.sampled_from([b"", b"{}", b'{"a": "\r\n\r\n"}', b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
STATUS_LINES = st.sampled_from(
    [b"HTTP/1.1 200 OK"] * 6
    + [b"HTTP/1.0 200 OK", b"HTTP/1.1 204 OK", b"HTTP/1.1 200 Fine", b"HTTP/1.1 100 Continue", b"HTTP/1.1  200 OK"]
)


@st.composite
def answers(draw):
    """What an engine may say: nearly always in good order, and then something is odd."""
    body = draw(BODIES)
    length = draw(st.one_of(st.just(b"%d"), LENGTHS))
    counted = b"content-length: " + length.replace(b"%d", b"%d" % len(body))
    lines = draw(st.lists(LINES, max_size=4, unique=True)) + draw(st.lists(ODD_LINES, max_size=1))
    lines = draw(st.permutations([*lines, counted]))
    said = b"\r\n".join([draw(STATUS_LINES), *lines, b"", body])
    return said + draw(st.sampled_from([b"", b"", b"", b"x", said]))


class Wire(asyncio.Transport):
    """Sends nothing anywhere."""

    closed = False

    def write(self, data):
        pass

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True

    close = abort

    def get_write_buffer_size(self):
        return 0

    def get_extra_info(self, name, default=None):
        return self if name == "socket" else default

    def fileno(self):
        return 0


class Nobody:
    """Owns a connection, and does not care."""

    def opened(self, connection):
        pass

    ended = closed = opened


async def told_of(*conversation):
    """Return what is told of each answer, given in pieces, and whether the connection may be used again."""
    connection = Connection(Peer(Address("http", "h", 80)), Nobody())
    connection.connection_made(Wire())
    found = []
    rests = True
    for pieces in conversation:
        call = Told()
        if not rests or not connection.start(call, b"POST / HTTP/1.1\r\n\r\n", [b""]):
            break
        for piece in pieces:
            connection.data_received(piece)
        head = (call.status, call.content_type, call.load) if call.status else None
        ends = ["failed" if call.error is not None else "end"] * call.is_over
        rests = connection.rest()
        found.append(([head, call.body, *ends], rests))
    return found


def usual(body=b"{}", *more):
    """Say it as vLLM does."""
    lines = (b"date: now", b"server: uvicorn", b"content-length: %d" % len(body), b"content-type: application/json")
    return b"\r\n".join([b"HTTP/1.1 200 OK", *lines, *more, b"", body])


@given(answers(), answers())
@example(usual(), usual(b""))
@example(usual() + b"x", usual())
@example(usual(b"{}", b"connection: close"), usual())
def test_a_whole_answer_means_what_it_means_in_pieces(first, second):
    """The first byte alone is nothing that the pattern knows; so llhttp reads the rest."""
    whole, in_pieces = (
        asyncio.run(told_of([first], [second])),
        asyncio.run(told_of([first[:1], first[1:]], [second[:1], second[1:]])),
    )

    assert whole == in_pieces


SIZES = st.sampled_from([b"%x"] * 8 + [b"%X", b"0%x", b"+%x", b" %x", b"%x ", b"%x;a=b", b"0x%x", b"1%x", b"_%x", b""])
PAYLOADS = st.sampled_from(
    [b"hi\n", b"data: " + b"x" * 20 + b"\n\n", b"\r\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"y" * 5000]
)
ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"", b"x\r\n", b"\r\n\r\n"])
LASTS = st.sampled_from(
    [b"0\r\n\r\n"] * 4 + [b"0\r\nx-a: b\r\n\r\n", b"00\r\n\r\n", b"\r\n", b"", b"0\r\n\r\n1\r\nx\r\n"]
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
AS_IT_IS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"  # up to the end of the connection
COUNTED = b"HTTP/1.1 200 OK\r\ncontent-length: 29\r\n\r\n"


@st.composite
def streams(draw):
    """What an engine may stream, mostly in good chunks that mostly come alone; something may be odd."""
    pieces = [draw(st.sampled_from([STREAM] * 6 + [AS_IT_IS, COUNTED]))]
    for payload in draw(st.lists(PAYLOADS, max_size=6)):
        size = draw(SIZES)
        pieces.append((size % len(payload) if b"%" in size else size) + b"\r\n" + payload + draw(ENDS))
    pieces.append(draw(LASTS))
    found = []
    for piece in pieces:
        how, cut = draw(st.integers(0, 5)), draw(st.integers(0, len(piece)))
        if how == 5 and found:
            found[-1] += piece[:cut]
            found.append(piece[cut:])
        elif how == 4:
            found += [piece[:cut], piece[cut:]]
        else:
            found.append(piece)
    return [piece for piece in found if piece]


@given(streams())
@example([STREAM + b"1", b"3\r\nabc\r\n"])  # half a size, and then what looks like a chunk
@example([STREAM, b"2\r\nhi\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"])
@example([STREAM, b"2\r\nhi\r\n1", b"3\r\nabc\r\n"])
@example([STREAM, b"2\r\nhi\r\n", b"8\r\n", b"3\r\nabc\r\n", b"\r\n0\r\n\r\n"])  # a chunk in a chunk
@example([STREAM, b"2\r\nhi\r\n8\r\n", b"3\r\nabc\r\n", b"\r\n0\r\n\r\n"])
@example([STREAM, b"2\r\nhi\r\n", b"0\r\nx: ", b"3\r\nabc\r\n", b"\r\n"])  # in a trailer
@example([STREAM + b"2\r\nhi\r\n3\r\nabc\r\n0\r\n\r\n"])  # all at once
@example([STREAM + b"2\r\nhi\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"])  # one answer too many
@example([STREAM, b"2\r\nhi\r\n", b"3;a=b\r\nabc\r\n", b"0\r\n\r\n"])  # llhttp gets the head in the middle
@example([STREAM, b"3\r\nhi\n\r\n", b"0\r\n\r\n\r\n"])  # an empty line behind it
@example([STREAM, b"3\r\nhi\n", b"\r\n0\r\n\r", b"\n\r\n"])
@example([COUNTED, b"3\r\nabc\r\n" * 2, b"3\r\nabc\r\n", b"0\r\n\r\n"])
def test_a_stream_means_what_it_means_byte_by_byte(pieces):
    """A chunk that comes alone need not go through llhttp; single bytes always do."""
    single = [bytes([byte]) for byte in b"".join(pieces)]

    together, apart = (asyncio.run(told_of(each, [usual()])) for each in (pieces, single))

    assert together[0][0] == apart[0][0]
    if pieces[0].startswith(STREAM):  # llhttp skips an empty line behind a counted body that comes with it
        assert together == apart


@pytest.mark.parametrize("size", [65_529, 65_536])
@pytest.mark.parametrize("chunk", [[b"3\r\nabc\r\n"], [b"3\r\nab", b"c\r\n"]], ids=["alone", "in pieces"])
def test_as_much_may_follow_a_lone_chunk_as_any_other(chunk, size):
    """A trailer is bounded in the same way behind it: up to 64 KiB may come since the last piece of a body."""
    pieces = [STREAM, b"2\r\nhi", b"\r\n", *chunk, b"0\r\nx: " + b"y" * size, b"\r\n\r\n"]

    ((_, content, end), usable), *_ = asyncio.run(told_of(pieces))

    assert content == b"hiabc"
    assert (end, usable) == (("end", True) if size < 65_536 else ("failed", False))


@pytest.mark.parametrize("stream", [[STREAM, b"2\r\nhi\r\n", b"0\r\n\r\n"], [STREAM + b"2\r\nhi\r\n0\r\n\r\n"]])
def test_a_chunk_is_no_answer(stream):
    """Nor is it one where the answer before came in chunks."""
    good, bad = asyncio.run(told_of(stream, [b"3\r\nabc\r\n"]))

    assert good == ([(200, b"text/event-stream", b""), b"hi", "end"], True)
    assert bad == ([None, b"", "failed"], False)


@pytest.mark.parametrize(
    ("received", "piece"),
    [
        (b"2\r\nhi\r\n", b"hi"),
        (b"fff\r\n" + b"x" * 4095 + b"\r\n", b"x" * 4095),
        (b"2\r\n\r\n\r\n", b"\r\n"),
        (b"0\r\n\r\n", None),
        (b"02\r\nhi\r\n", None),
        (b"A\r\n0123456789\r\n", None),
        (b"+2\r\nhi\r\n", None),
        (b"2\r\nhi\r\n2\r\nho\r\n", None),
        (b"2\r\nhi", None),
        (b"2\r\nhix\n", None),
        (b"2\r\nhi\r", None),
        (b"\r\n\r\n", None),
        (b"", None),
    ],
)
def test_a_lone_chunk_is_one_as_engines_write_them(received, piece):
    """Everything else is left to llhttp."""
    assert parse_single_chunk(received) == piece


def test_most_answers_are_usual():
    """Those of vLLM are, as uvicorn writes them."""
    assert SimpleResponses().match(usual(b'{"id":"cmpl-1"}')) == b'{"id":"cmpl-1"}'
    assert SimpleResponses().match(usual(b"")) == b""


@given(st.lists(answers(), min_size=2, max_size=5))
@example([usual(b"{}"), usual(b"[]"), usual(b"{}x"), usual(b'{"a":1}') + b"x", usual(b'{"a":1234}')])
@example([usual(b"{}"), usual(b"{}").replace(b"length: 2", b"length: +"), usual(b"{}").replace(b"now", b"2")])
def test_an_answer_is_the_same_behind_any_other(conversation):
    """Its head may differ from the one before in nothing but the length."""
    engine = SimpleResponses()

    assert [engine.match(said) for said in conversation] == [SimpleResponses().match(said) for said in conversation]


@given(st.lists(streams() | answers().map(lambda said: [said]), min_size=2, max_size=5))
@example([[STREAM, b"0\r\n\r\n"], [STREAM.replace(b"stream", b"streak"), b"0\r\n\r\n"], [usual()], [STREAM]])
def test_a_stream_is_the_same_behind_any_other_answer(conversation):
    """Its head is compared with that of the stream before."""
    engine = SimpleResponses()

    for pieces in conversation:
        said = b"".join(pieces)
        alone = SimpleResponses()
        assert engine.match(said) == alone.match(said)
        head = engine.match_stream(said)
        assert head == alone.match_stream(said)
        assert not head or engine.stream_type == alone.stream_type


@pytest.mark.parametrize("read_before", range(1, len(usual())))
def test_what_follows_half_an_answer_goes_on_with_it(read_before):
    """Also if it looks like an answer: it is the rest of a header, or of a body."""
    before = usual(usual(b"{}"))[:read_before]
    after = usual(b"[]")
    all_of_it = before + after

    found = asyncio.run(told_of([before, after]))

    assert found == asyncio.run(told_of([all_of_it[:1], all_of_it[1:]]))


def test_one_pattern_and_llhttp_take_turns():
    """On one connection, in any order."""
    chunked = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    ways = {b"{}": [usual()], b"[]": [usual(b"[]")[:30], usual(b"[]")[30:]], b"hi": [chunked]}
    for order in itertools.product(ways, repeat=3):
        found = asyncio.run(told_of(*[ways[body] for body in order]))

        assert [heard[1:] for heard, _ in found] == [[body, "end"] for body in order]
        assert all(reusable for _, reusable in found)
