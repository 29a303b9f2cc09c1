"""Where one message ends and the next begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.errors import ProtocolViolation
from pdrelay_connector.io.framing import Deframer, frame


@given(st.lists(st.binary(max_size=50), max_size=10), st.lists(st.integers(1, 30), max_size=50))
def test_messages_arrive_whole_however_the_stream_is_cut(messages, cuts):
    """TCP knows no messages."""
    stream = b"".join(map(frame, messages))
    deframer = Deframer(50)
    arrived = []
    for cut in [*cuts, len(stream) + 1]:
        arrived += deframer.feed(stream[:cut])
        stream = stream[cut:]

    assert arrived == messages


def test_a_message_that_is_too_long_is_refused_before_it_is_there():
    """Its length alone is enough: nobody makes us buffer it."""
    deframer = Deframer(10)

    with pytest.raises(ProtocolViolation, match="11 bytes; at most 10"):
        list(deframer.feed(frame(b"x" * 11)[:4]))


def test_messages_before_one_that_is_too_long_arrive():
    """They were said."""
    feed = Deframer(10).feed(frame(b"x" * 10) + frame(b"x" * 11))

    assert next(feed) == b"x" * 10
    with pytest.raises(ProtocolViolation):
        next(feed)


def test_the_limit_can_be_raised_between_two_messages():
    """A stranger who has greeted may say more."""
    deframer = Deframer(4)
    feed = deframer.feed(frame(b"1234") + frame(b"123456"))
    first = next(feed)
    deframer.limit = 6

    assert (first, next(feed)) == (b"1234", b"123456")
