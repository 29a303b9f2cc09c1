"""Where heads end; what a real router does of it is in test_front_door.py."""

import pytest

from pdrelay_proxy.core.http.framing import HEAD_MOST, find_end, read_head
from pdrelay_proxy.errors import BadFraming, HeadTooLarge, UriTooLong

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"


def test_a_head_ends_behind_its_empty_line():
    """However much of it was looked at before."""
    assert {find_end(HEAD + b"abc", 0, read=read) for read in range(len(HEAD))} == {len(HEAD)}
    assert find_end(HEAD[:-1], 0) == -1


@pytest.mark.parametrize(("received", "error"), [
    (b"x" * HEAD_MOST, UriTooLong), (b"x\r\n" * HEAD_MOST, HeadTooLarge), (b"GET / HTTP/1.1\n", BadFraming),
])  # fmt: skip
def test_what_cannot_become_a_head_is_refused_before_its_end(received, error):
    """It may never come."""
    with pytest.raises(error):
        find_end(received, 0)


def test_only_the_offer_of_an_upgrade_is_left_out():
    """The rest of the head is as it came."""
    offered = HEAD.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")

    assert read_head(HEAD).raw is HEAD
    assert read_head(offered).raw == offered.replace(b"Upgrade: h2c\r\n", b"")
    assert read_head(offered).length == 3


@pytest.mark.parametrize(
    ("value", "keeps"),
    [
        (b"close", False),
        (b"Close", False),
        (b"keep-alive, close", False),
        (b"keep-alive,\tclose\t", False),
        (b"a\r\nConnection: close", False),
        (b"keep-alive", True),
        (b"closed", True),
        (b"cl ose", True),
    ],
)
def test_a_client_may_ask_for_its_connection_to_be_closed(value, keeps):
    """In a list, whose white space may be tabs (RFC 9110, 5.6.1 and 5.6.3)."""
    assert read_head(HEAD.replace(b"Host", b"Connection: " + value + b"\r\nHost")).keep_alive is keeps
