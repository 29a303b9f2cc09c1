"""Server-sent events, as far as a relay must understand them."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.protocol.sse import LINE_MOST, Beginning, WholeLines
from pdrelay_proxy.errors import EngineError

STREAM = b': keep-alive\n\ndata: {"a":1}\n\ndata: {"b":"[DONE]"}\n\ndata: [DONE]\n\n'


@given(cuts=st.lists(st.integers(0, len(STREAM))), stop=st.integers(0, len(STREAM)))
def test_lines_pass_whole_whatever_the_network_makes_of_them(cuts, stop):
    """Nothing is lost, nothing is held back longer than its line, and only a whole stream counts as complete."""
    lines = WholeLines("d0")
    passed = b""
    edges = sorted({0, stop, *(cut for cut in cuts if cut < stop)})
    for start, end in itertools.pairwise(edges):
        passed += lines.feed(STREAM[start:end])
        assert STREAM[: STREAM.rfind(b"\n", 0, end) + 1] == passed
    rest, complete = lines.finish()

    assert complete == (stop >= len(STREAM) - 2)
    assert (passed + rest == STREAM[:stop]) if complete else rest == b""


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\n",
        b"data: [DONE]",
        b"data:[DONE]\n\n",
        b"data:[DONE]",
        b"data: [DONE]\r\n\r\n",
        b"data: [DONE]\n\n: a comment that is longer than what is remembered of a stream\n\n",
        b"data: [DONE]\n\n:\n:\n\n",
        b"data: [DONE]\n\n: half a comment",
        b"data: [DONE]\n: within the event\n\n",
    ],
)
def test_the_end_is_recognised_alone_and_after_anything(end):
    """A stream of nothing but its end is complete too."""
    for before in (b"", b"data: {}\n\n", b"data: " + b"x" * 100 + b"\n\n"):
        lines = WholeLines("d0")
        lines.feed(before)
        passed = lines.feed(end)

        rest, complete = lines.finish()
        assert complete
        assert end == passed + rest


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("space", [b" ", b""], ids=["space", "no space"])
@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"event: message_stop\ndata: {}\n\n"], ids=["done", "named"])
@pytest.mark.parametrize("behind", [b"", b": bye\n\n", b":\n", b": bye", b"\n\n"])
def test_every_legal_framing_is_complete(size, ending, space, last, behind):
    """The HTML standard, 9.2.5: lines end in three ways, and the space behind the colon may be missing."""
    stream = b': hi\n\nevent: x\ndata: {"a": 1}\n\ndata: {"b":"kv_transfer_params"}\n\n' + last + behind
    framed = stream.replace(b": {", b":" + space + b"{").replace(b": [", b":" + space + b"[").replace(b"\n", ending)
    lines = WholeLines("d0")
    passed = b""
    for at in range(0, len(framed), size):
        passed += lines.feed(framed[at : at + size])
    rest, complete = lines.finish()

    assert complete
    assert (passed + rest).splitlines() == framed.replace(b'data:{"b"', b'data: {"b"').splitlines()
    assert not lines.erred


def test_the_lines_of_an_event_may_end_in_different_ways():
    """As one that a proxy has put together: a good answer would end with an error."""
    lines = WholeLines("d0")
    passed = lines.feed(b"event: message_stop\rdata: {}\n\n")

    assert passed == b"event: message_stop\ndata: {}\n\n"
    assert lines.finish() == (b"", True)


def test_a_line_that_ends_with_a_carriage_return_passes_at_once():
    """Its event is complete: the client of a slow stream would wait for the next token."""
    lines = WholeLines("d0")

    assert lines.feed(b"data: 1\r\r") == b"data: 1\n\n"
    assert lines.feed(b"data: 2\r\n\r") == b"data: 2\n\n"
    assert lines.feed(b"\ndata: 3\r\n\r\n") == b"data: 3\r\n\r\n"


@pytest.mark.parametrize("sizes", [1, 2, 3, 100])
@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\xef\xbb\xbf: hi\r\r", b"\r", b"id: 1\r"])
def test_the_first_event_is_found_behind_a_mark(start, sizes):
    """Of a byte order, which is no part of a line."""
    stream = start + b'data:{"error":{"code":400}}\r\r'
    beginning = Beginning()
    found = [beginning.feed(stream[at : at + sizes]) for at in range(0, len(stream), sizes)]

    assert [data for data in found if data is not None][:1] == [b'{"error":{"code":400}}']
    assert bytes(beginning.received).startswith(start.removeprefix(b"\xef\xbb\xbf"))


def test_text_that_looks_like_the_end_is_not_the_end():
    """A model may write [DONE]; JSON has no line break to put before it."""
    lines = WholeLines("d0")
    lines.feed(b'data: {"text":"\\ndata: [DONE]\n\n')

    assert not lines.finish()[1]


@pytest.mark.parametrize("name", ["message_stop", "response.completed", "response.failed", "error"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_other_apis_end_with_a_named_event(name, size):
    """However it is cut into pieces; half of it is no end."""
    text = b'event: message_start\ndata: {"text":"event: message_stop"}\n\nevent: ' + name.encode()
    for tail, complete in (
        (b'\ndata: {"long":"%s"}\n\n' % (b"x" * 100), True),
        (b'\ndata: {"half', False),
        (b"", False),
    ):
        lines = WholeLines("d0")
        whole = text + tail
        passed = b"".join(lines.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        rest, is_complete = lines.finish()

        assert is_complete is complete
        assert (passed + rest == whole) is complete


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_name_of_the_last_event_is_no_end(end):
    """Its line may come alone: the engine has died before the event's data has passed."""
    lines = WholeLines("d0")
    lines.feed(b"event: response.completed" + end)
    assert not lines.finish()[1]

    lines.feed(b'data: {"long":"%s"}' % (b"x" * 100) + end + end)
    assert lines.finish() == (b"", True)


@pytest.mark.parametrize(
    ("events", "erred"),
    [
        (b'data: {"error":{"code":500}}\n\ndata: [DONE]\n\n', True),
        (b'event: error\ndata: {"type":"error"}\n\n', True),
        (b'data:{"error":{"code":500}}\n\ndata:[DONE]\n\n', True),
        (b'event:error\rdata:{"type":"error"}\r\r', True),
        (b'data: {"text":"data: {\\"error\\":"}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_an_engine_may_say_itself_that_it_failed(events, erred):
    """The stream came to its end, and the engine is to blame all the same."""
    lines = WholeLines("d0")
    lines.feed(b'data: {"id":1}\n\n')
    lines.feed(events)

    assert lines.finish()[1]
    assert lines.erred is erred


def test_a_line_that_does_not_end_is_given_up():
    """Bytes that only wait to be joined would take all memory."""
    lines = WholeLines("d0")
    lines.feed(b"data: {}\n\n")
    piece = b"x" * 65536
    for _ in range(LINE_MOST // len(piece)):
        assert lines.feed(piece) == b""

    with pytest.raises(EngineError, match="d0 sent a line of more than 16777216 bytes"):
        lines.feed(b"x")


@pytest.mark.parametrize("feed", [Beginning().feed, WholeLines("d0").feed], ids=["beginning", "rest"])
def test_small_pieces_cost_what_large_ones_do(feed):
    """Half a million of them: joining or searching all that came before with each would take minutes."""
    began = time.process_time()
    for _ in range(500_000):
        feed(b"xy")

    assert time.process_time() - began < 10


def test_parameters_do_not_pass_in_pieces():
    """A name that is cut in two is one name."""
    lines = WholeLines("d0")
    passed = b""
    stream = b'data: {"a":1,"kv_transfer_params":{"remote_host":"h"}}\n\ndata: [DONE]\n\n'
    for at in range(0, len(stream), 7):
        passed += lines.feed(stream[at : at + 7])

    assert passed + lines.finish()[0] == b'data: {"a":1}\n\ndata: [DONE]\n\n'
